"""Trains the prior of TVM's searches on all tables of `benchmarks/trials`, into the package.

    python -m benchmarks.train_prior

`scripts/bench search` measures it on operators that it was not trained on.
"""

from pathlib import Path

from benchmarks.search import FOLDER, prior_of, read

if __name__ == "__main__":
    made = prior_of(read(FOLDER).values())
    file = Path(__file__).parents[1] / "tuna/libraries/tvm/prior.model"
    file.write_bytes(made)
    print(f"{file}: {len(made)} bytes")

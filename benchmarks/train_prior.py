"""Trains the prior of TVM's searches on all tables of `benchmarks/trials`, and writes it into the
package.

    python -m benchmarks.train_prior

How good it is for operators that it was not trained on, `scripts/bench search` tells.
"""

from pathlib import Path

from benchmarks.search import FOLDER, prior_of, read

if __name__ == "__main__":
    made = prior_of(read(FOLDER).values())
    file = Path(__file__).parents[1] / "tuna/libraries/tvm/prior.model"
    file.write_bytes(made)
    print(f"{file}: {len(made)} bytes")

"""Tunes the layers of a file on this machine and prints what is fastest: `python
examples/tune_layers.py layers.txt`."""

from __future__ import annotations

import sys
from pathlib import Path

from tuna import api
from tuna.errors import TunaError


def main(path: Path) -> int:
    """Tune, then print a line for each layer; returns the exit code that a command would have."""
    try:
        wanted = api.Tuning("tvm", reason="tune_layers.py", options={"candidates": 8})
        prepared = api.prepare_tuning(path, path.stem, wanted)
        session_id = prepared.session.id
        end = api.run(session_id)
        total_ms = 0.0
        for row in api.winners(session_id, path.stem):
            total_ms += row.time_ms or 0.0
            print(f"{row.layer}: {row.solver}, {row.time_ms} ms {row.marks}\n  {row.command}")
        trials = api.query(api.ResultFilter(tag=path.stem, n_best=3))
        print(f"{total_ms:.3f} ms; {len(trials)} trials to choose from")
    except TunaError as error:
        print(f"{error} {error.hint}", file=sys.stderr)
        return error.exit_code
    return 1 if end.errored else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))

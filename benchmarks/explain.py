"""From line 41,207 of a shipped find db to where it comes from.

Three find dbs of MIOpen's form are imported, with two solvers of each of `--entries` / 2 layers and
other times, and each becomes a golden version, promoted with a note; the last is exported. Then the
line is explained by the command, and its entry by a page of `tuna serve`. A few layers measured by
the library `example` are released too, and the command that their entry prints is run.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

from benchmarks.harness import Outcome, command_line
from benchmarks.serve import serving
from benchmarks.servers import home

LIMITS = {"command_s": 1.0, "page_s": 1.0, "reproduce_rc": 0.0}
_VERSIONS, _LINE, _REPEATS = 3, 41_207, 5
_NOTE = "nightly"


def main() -> int:
    """Command line; `--entries`: of each golden version."""
    options = command_line(__doc__, entries=50_000).parse_args()
    with home("sqlite") as folder:
        return _measure(folder, options.entries)


def _measure(folder: Path, entries: int) -> int:
    for version in range(1, _VERSIONS + 1):
        text = folder / "gfx942130.HIP.fdb.txt"
        _write(text, version, entries // 2)
        made = ["--rocm-version=6.2.0", "--miopen-version=3.3.0", f"--label=night {version}"]
        _tuna("import-db", str(text), *made)
        base = [f"--base={version - 1}"] if version > 1 else []
        words = ["golden", "build", str(version), f"--session-id={version}", "--allow-imported"]
        _tuna(*words, *base)
        _tuna("golden", "promote", str(version), f"--note={_NOTE} {version}")
    where = ["--arch=gfx942", "--num-cu=304", "--form=find", "-d", str(folder / "out")]
    _tuna("export", f"--golden={_VERSIONS}", *where)
    (shipped,) = (folder / "out").glob("*.fdb.txt")
    lines = shipped.read_text().splitlines()
    number = min(_LINE, len(lines))
    words = ["golden", "explain", str(_VERSIONS), f"{shipped}:{number}", "--json"]
    commands = [_timed(words) for _ in range(_REPEATS)]
    (explanation,) = json.loads(commands[0][1])
    assert explanation["others"][0]["margin"] is not None
    assert [one["note"] for one in explanation["history"]] == [f"{_NOTE} {v}" for v in (1, 2, 3)]
    with serving() as service:
        key = quote(lines[number - 1].partition("=")[0])
        pages = [service.get(f"/golden/{_VERSIONS}/explain?key={key}") for _ in range(_REPEATS)]
        assert f"{_NOTE} {_VERSIONS}" in pages[0][1].decode()
    figures = {
        "entries": float(entries),
        "line": float(number),
        "entry": float(explanation["entry"]["id"]),
        "command_s": statistics.median(seconds for seconds, _ in commands),
        "page_s": statistics.median(seconds for seconds, _ in pages),
        "reproduce_rc": float(_reproduce(folder)),
    }
    return Outcome("explain", figures, limits=LIMITS).print()


def _write(path: Path, version: int, layers: int) -> None:
    """Write a find db with two solvers of each layer."""
    times = random.Random(version)  # noqa: S311
    with path.open("w") as file:
        for batch in range(1, layers + 1):
            first, second = (times.uniform(0.1, 0.2) for _ in range(2))
            file.write(
                f"64-28-28-3x3-64-28-28-{batch}-1x1-1x1-1x1-0-NCHW-FP32-F="
                f"ConvAsm3x3U:{first},0,miopenConvolutionFwdAlgoDirect;"
                f"ConvOclDirectFwd:{second},0,miopenConvolutionFwdAlgoDirect\n"
            )


def _reproduce(folder: Path) -> int:
    """Release what the library `example` measures, and return the exit code of the command that an
    entry of it prints."""
    os.environ["TUNA_EXAMPLE_PROGRAM"] = "/bin/true"
    layers = folder / "layers.txt"
    layers.write_text("MIOpenDriver gemm -m 8 -n 8 -k 8\nMIOpenDriver gemm -m 8 -n 8 -k 9\n")
    _tuna("tune", str(layers), "-t", "few", "--library=example", "-o", str(folder / "few"))
    _tuna("golden", "build", "1", f"--session-id={_VERSIONS + 1}", "--library=example")
    words = ["golden", "explain", "1", layers.read_text().splitlines()[0], "--library=example"]
    (found,) = json.loads(_tuna(*words, "--json"))
    command = shlex.split(found["reproduce"])
    done = subprocess.run([sys.executable, "-m", *command], stdout=sys.stderr.fileno(), check=False)
    return done.returncode


def _timed(words: list[str]) -> tuple[float, str]:
    started = time.perf_counter()
    text = _tuna(*words)
    return time.perf_counter() - started, text


def _tuna(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tuna", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"tuna {shlex.join(words)}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

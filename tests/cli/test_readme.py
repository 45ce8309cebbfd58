"""The rows of the tables of README and docs/tasks.md, typed as they are printed."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import DRIVERS, DatabaseBuilder, tuned_network
from command_lines import Ended
from places import TESTS

from tuna.db import networks
from tuna.db.engine import make_engine, writing
from tuna.db.networks import Named

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for page in ("README.md", "docs/tasks.md")
    for line in (ROOT / page).read_text().splitlines()
    if line.startswith("| ")
]
TYPED = re.findall(r"`((?:tuna|python) [^`]+)`", "\n".join(ROWS))
#: Commands that another test types, and where.
ELSEWHERE = {
    "tuna tune-rpc @examples/tune_rpc.yaml @examples/workloads.yaml": "test_at_files.py",
    "tuna serve": "test_serving.py",
    "tuna token create --role submit --space mykernels": "test_spaces.py",
    "tuna cache pack mykernels pack": "test_served_cache.py",
    "tuna predictor train": "test_predictors.py",
    "tuna predictor use": "test_predictors.py",
    'tuna query --predict "MIOpenDriver conv -n 1 -c 64 -H 28 -W 28 -k 64 -y 3 -x 3 -p 1 -q 1'
    ' -F 1"': "test_predictors.py",
    "tuna tune examples/triton_kernels/layers.jsonl --library triton -t mymodel -o tiles": (
        "test_vllm_page.py"
    ),
    "tuna tune examples/triton_kernels/softmax.py --shapes examples/triton_kernels/shapes.json"
    " -o tiles": "test_triton_pipeline.py",
}
#: What tunes, or is a program of its own: a drill types it.
TUNING = [
    line for line in TYPED if line.startswith(("tuna tune ", "python ")) and line not in ELSEWHERE
]
READING = [line for line in TYPED if line not in {*TUNING, *ELSEWHERE}]


@pytest.fixture
def tuned(home: Path) -> None:
    """Two sessions with the same layers, which a network names."""
    engine = make_engine(f"sqlite:///{home}/tuna.sqlite")
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        first = tuned_network(build, trials=3)
        second = build.session(reason="another night")
        rows = [build.config(layer) for layer in DRIVERS]
        for row in rows:
            build.winner(
                second, row, build.solver("TvmConvDirectNCHW"), 1.0, kernel=build.kernel(b"library")
            )
        network, framework = Named("ResNet-50", "1"), Named("onnx", "1")
        networks.add_model(connection, network)
        networks.add_framework(connection, framework)
        ids = networks.ids(connection, network, framework)
        networks.set_weights(connection, *ids, 1, dict.fromkeys(rows, 1))
    engine.dispose()
    assert (first, second) == (1, 2), "the numbers that the table has"


def test_no_row_has_a_word_to_replace() -> None:
    words = {word for line in TYPED for word in shlex.split(line)}
    assert not {word for word in words if word.isupper() or "..." in word}


def test_each_file_of_a_row_is_in_the_repository_or_written_by_a_row_above() -> None:
    """M6: rows named layers.txt, model.onnx and other files that a new user does not have."""
    written = set(re.findall(r"`([\w-]+)/`", (ROOT / "README.md").read_text()))
    assert written == {"quickstart-results"}
    for line in TYPED:
        words = shlex.split(line)
        outputs = {after for option, after in itertools.pairwise(words) if option == "-o"}
        for word in {word.lstrip("@") for word in words if " " not in word} - outputs:
            if re.search(r"[a-z][./][a-z]|-results$", word):
                assert word in written or (ROOT / word).exists(), line
        written |= outputs


def test_the_tables_are_found() -> None:
    assert sum("you want to" in row for row in ROWS) == 2
    assert len(ROWS) > 26
    assert {
        "tuna doctor",
        "tuna results --session-id 1",
        "tuna coverage ResNet-50",
    } <= set(READING)
    assert len(TUNING) == 4
    for line, file in ELSEWHERE.items():
        (path,) = (path for folder in TESTS for path in folder.rglob(file))
        assert line.split()[1] in path.read_text()


@pytest.mark.service
@pytest.mark.parametrize("line", READING)
@pytest.mark.usefixtures("tuned")
def test_a_row_that_reads_works_as_printed(line: str, type_in: Callable[..., Ended]) -> None:
    ended = type_in(*shlex.split(line))
    assert ended.code == 0, ended
    assert ended.out.strip()


@pytest.mark.drill(only=True)
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
def test_the_rows_that_tune_work_as_printed() -> None:
    """In their order and in one folder, as programs; what the first of them wrote is taken for what
    the quickstart does."""
    Path("examples").symlink_to(ROOT / "examples")
    for line in TUNING:
        program, *words = shlex.split(line.replace("quickstart-results", "out"))
        program = str(Path(sys.executable).with_name(program))
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert json.loads(Path("model.so.json").read_text())["inputs"]

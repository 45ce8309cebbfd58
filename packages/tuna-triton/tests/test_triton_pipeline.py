"""The main job for a GPU, small: Triton's real compiler, real workers, and a stand-in of NVIDIA's
driver that multiplies what the kernels should multiply."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from cuda_double.stand_in import install, variables

from tuna_triton.kernel_import import read_kernel

pytest.importorskip("triton", reason="needs the extra `triton`")

#: Of a search, and of each of its rounds.
CANDIDATES, BATCH = 3, 2
BLOCKS = {"scheme": "fp8_w8a8", "block_n": 128, "block_k": 128}
SCALES = {"scale_a": "block1x128", "scale_b": "block128x128"}


def experts(tokens: int, **facts: object) -> dict[str, object]:
    sizes = {"experts": 4, "intermediate": 128, "hidden": 256, "topk": 2}
    return {"kind": "moe", "tokens": tokens, **sizes, **facts}


def product(rows: int, **facts: object) -> dict[str, object]:
    return {"kind": "gemm", "m": rows, "n": 130, "k": 260, "data_type": "FP16", **facts}


#: Every scheme, sizes that no tile divides, and those of 1, which are no arguments of a kernel.
LAYERS = [
    experts(21, **BLOCKS),
    experts(3, data_type="FP16"),
    experts(40, hidden=72, intermediate=40, scheme="fp8_w8a8"),
    experts(5, topk=1, hidden=96, scheme="int8_w8a16"),
    experts(1, topk=1, experts=2),
    product(96),
    product(1, n=1, data_type="BF16"),
    product(40, trans_b=True, data_type="FP8_E4M3", c_type="BF16"),
    product(41, trans_b=True, data_type="FP8_E4M3", c_type="BF16", **SCALES),
]


@pytest.fixture
def tuna(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`tuna("status", "--json")`: what the command prints beside the stand-in."""
    for name, value in variables(install(tmp_path / "driver")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TUNA_HOME", str(home))

    def run(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "tuna", *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


def load(tuna: Callable[..., str], folder: Path, layers: Sequence[dict[str, object]]) -> None:
    """A session with these layers."""
    (folder / "layers.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in layers))
    for words in (
        "init-session triton -l first",
        "import layers.jsonl -t mine",
        "update-solvers triton",
        "applicability --session-id 1",
        f"load-jobs --session-id 1 -t mine --candidates {CANDIDATES} --option batch={BATCH}",
    ):
        tuna(*words.split())


@pytest.mark.service
@pytest.mark.parametrize(
    "layers", [LAYERS[:1], pytest.param(LAYERS[1:], marks=pytest.mark.drill(only=True))]
)
def test_layers_are_compiled_measured_and_stored(
    layers: Sequence[dict[str, object]], home: Path, tmp_path: Path, tuna: Callable[..., str]
) -> None:
    load(tuna, tmp_path, layers)
    tuna("run", "--session-id", "1")
    (status,) = json.loads(tuna("status", "--json"))
    assert (set(status["jobs"]), status["failures"]) == ({"evaluated"}, [])
    with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
        trials = connection.execute("SELECT time_ms, max_error, cause FROM trial").fetchall()
        tried = connection.execute(
            "SELECT search_id, round, params FROM job JOIN trial ON job_id = job.id"
            " ORDER BY config_id, search_id IS NULL, round, number"
        ).fetchall()
        best = connection.execute(
            "SELECT solver.name, find_db.params, find_db.time_ms, find_db.noisy FROM find_db"
            " JOIN solver ON solver.id = find_db.solver_id"
        ).fetchall()
        devices = connection.execute("SELECT name, peak_source FROM device").fetchall()
        (environment,) = connection.execute("SELECT arch, num_cu, device FROM environment")
    # on a busy machine some tiles take more than 20 seconds to build
    right = [(error, cause) for _, error, cause in trials if cause != "build_timeout"]
    assert all(cause is None and error < 1e-2 for error, cause in right), right
    # and the consumer's default
    assert len(trials) == len(layers) * (CANDIDATES + 1)
    # the default has the build key of the first candidate
    assert len([*(home / "artifacts").rglob("*.build")]) <= len(layers) * CANDIDATES
    for place in range(0, len(tried), CANDIDATES + 1):
        *searched, (no_search, _, default) = tried[place : place + CANDIDATES + 1]
        assert [number for _, number, _ in searched] == [0, 0, 1]
        assert (no_search, searched[0][2]) == (None, default)
    tuned = [name for name, *_ in best if not name.endswith("Default")]
    assert (len(best), len(tuned)) == (2 * len(layers), len(layers))
    for _, params, time_ms, noisy in best:
        assert 0.002 <= time_ms < 1
        assert not noisy
        assert set(json.loads(params)) >= {"BLOCK_SIZE_M", "num_warps"}
    name = "NVIDIA Fake H100 80GB HBM3"
    assert environment == ("sm_90", 132, name)
    assert devices == [(name, "device")]


ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "triton_kernels"
#: The arguments of the examples.
KERNELS = {
    "softmax": "name=softmax params=8,8,4,8,8 run=softmax_fp32 time_us=8 spread=0.01",
    "layer_norm": "name=layer_norm params=8,8,8,8,4,4,8,8 run=layer_norm_fp32 block_us=0.5",
}


@pytest.mark.service
@pytest.mark.timeout(900)
def test_kernels_of_ones_own_are_tuned_from_their_files_and_a_wrong_answer_is_refused(
    tmp_path: Path, tuna: Callable[..., str]
) -> None:
    script, out = tmp_path / "driver" / "script", tmp_path / "out"
    script.write_text("\n".join(KERNELS.values()))
    out.mkdir()
    shapes = str(EXAMPLES / "shapes.json")
    for name in KERNELS:
        words = ("tune", str(EXAMPLES / f"{name}.py"), "--shapes", shapes, "-t", "mine")
        said = tuna(*words, "--candidates", "3", "-o", str(out))
        assert f"{name} columns=1024 rows=32" in said
    (page,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "gpu.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(page, names)  # noqa: S102  # a page of this project
    for name in KERNELS:
        kernel = read_kernel(EXAMPLES / f"{name}.py", EXAMPLES / "shapes.json")
        tiles = names["load_tiles"](out / "sm_9084.triton.json", "sm_90", name)
        axes = dict(kernel.file.axes)
        for shape in json.loads((EXAMPLES / "shapes.json").read_text()):
            arguments, options = tiles[names["label_of"](name, shape)]
            assert {**arguments, **options}.keys() == axes.keys()
            assert all(value in axes[axis] for axis, value in {**arguments, **options}.items())
            assert set(options) == {"num_warps"}
    results = json.loads(tuna("results", "--session-id", "1", "--json"))
    assert [one["solver"] for one in results] == 4 * ["TritonKernel"]
    assert all(one["max_error"] < 1e-6 and one["time_ms"] > 0.001 for one in results)
    script.write_text(f"{KERNELS['softmax']} wrong_after=0")
    (tmp_path / "one.json").write_text('[{"rows": 3, "columns": 5}]')
    words = ("tune", str(EXAMPLES / "softmax.py"), "--shapes", "one.json", "--candidates", "2")
    tuna(*words, code=1)
    failed = [one for one in json.loads(tuna("status", "--json")) if one["failures"]]
    assert "wrong_result" in json.dumps(failed)


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layer", [product, functools.partial(experts, **BLOCKS)])
def test_no_result_is_lost_when_processes_are_killed(
    layer: Callable[[int], dict[str, object]],
    home: Path,
    tmp_path: Path,
    tuna: Callable[..., str],
) -> None:
    """Ten times one process of the run, whichever it is; a run that ends is started again."""
    load(tuna, tmp_path, [layer(1 + 48 * number) for number in range(8)])
    generator, kept, killed = random.Random(7), set[tuple[int, float]](), list[str]()

    def results() -> set[tuple[int, float]]:
        with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
            done = connection.execute("SELECT id, time_ms FROM trial WHERE time_ms IS NOT NULL")
            return set(done.fetchall())

    run = psutil.Popen([sys.executable, "-m", "tuna", "run", "--session-id", "1"], cwd=tmp_path)
    for _ in range(10):
        time.sleep(generator.uniform(2, 6))
        if run.poll() is not None:
            run = psutil.Popen(
                [sys.executable, "-m", "tuna", "run", "--session-id", "1"], cwd=tmp_path
            )
            time.sleep(4)
        with contextlib.suppress(psutil.Error):
            victim = generator.choice([run, *run.children(recursive=True)])
            killed.append(" ".join(victim.cmdline())[-60:])
            victim.kill()
        now = results()
        assert {one for one, _ in kept} <= {one for one, _ in now}
        kept = now
    run.kill()
    run.wait()
    subprocess.run([sys.executable, "-m", "tuna", "run", "--session-id", "1"], cwd=tmp_path)
    (status,) = json.loads(tuna("status", "--json"))
    assert set(status["jobs"]) == {"evaluated"}, (killed, status["failures"])
    assert {one for one, _ in kept} <= {one for one, _ in results()}
    with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
        (written,) = connection.execute("SELECT count(*) FROM find_db").fetchone()
    assert written == 8 * 2

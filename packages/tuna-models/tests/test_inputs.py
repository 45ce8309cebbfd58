"""The inputs of a model are drawn from what it can take, or are those of a file, wherever the model
is run."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import pytest
from command_lines import Ended
from nets import Net
from onnx import TensorProto

from tuna.common.cpu import cpu_model
from tuna.errors import BadInput
from tuna_models.api.benchmarks import benchmark_model
from tuna_models.judging import bounds as bounds_of_inputs
from tuna_models.judging import inputs
from tuna_models.reading import importer

EXAMPLE = Path(__file__).parents[3] / "examples" / "run_model.py"
INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def inputs_of(model: Any) -> list[dict[str, Any]]:
    return bounds_of_inputs.of(importer.to_relax(model, "net"))


def bounds(model: Any) -> list[bounds_of_inputs.Bounds | None]:
    return [one["bounds"] for one in inputs_of(model)]


def sums_of(library: Path) -> dict[str, Any]:
    """The size and SHA-256 that stand beside a library."""
    data = library.read_bytes()
    return {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize(
    ("edit", "example", "benchmark"),
    [
        (lambda library, beside: library.unlink(), "net.so is not there: `tuna model build", None),
        (lambda library, beside: beside.unlink(), "net.so.json is not there: `tuna model", None),
        (lambda library, beside: beside.write_text("{}"), "is not what `tuna model build`", None),
        (
            lambda library, beside: library.write_bytes(b"\x7fELF"),
            "is cut off: it has 4 bytes, and should have 68;",
            "net.so has 4 bytes, and 68 by net.so.json: it is cut off or damaged,",
        ),
        (
            lambda library, beside: library.write_bytes(b"\x7fELF" + bytes(63) + b"1"),
            "net.so is not the library of",
            "net.so has another SHA-256 than net.so.json says: it is cut off or damaged,",
        ),
    ],
    ids=["no library", "no facts", "other facts", "cut off", "damaged"],
)
def test_a_library_that_is_not_whole_is_not_loaded(
    tmp_path: Path, edit: Callable[[Path, Path], Any], example: str, benchmark: str | None
) -> None:
    """Linux would end the process by SIGBUS where a library ends before its segments do."""
    library, beside = tmp_path / "net.so", tmp_path / "net.so.json"
    library.write_bytes(b"\x7fELF" + bytes(64))
    beside.write_text(json.dumps({"inputs": [], "target": {}, **sums_of(library)}))
    facts_of = runpy.run_path(str(EXAMPLE))["facts_of"]
    assert facts_of(library)["size_bytes"] == 68
    edit(library, beside)
    with pytest.raises(SystemExit, match=re.escape(example)):
        facts_of(library)
    if benchmark is not None:
        with pytest.raises(BadInput, match=re.escape(benchmark)):
            benchmark_model(library)


def test_a_library_is_not_loaded_on_a_cpu_without_its_instructions(tmp_path: Path) -> None:
    """The first of them would end the process by SIGILL, without a word."""
    facts = {"target": {"mcpu": "znver9"}, "cpu_flags": ["avx2", "avx2048"], "inputs": []}
    library = tmp_path / "net.so"
    library.write_bytes(b"\x7fELF")
    Path(f"{library}.json").write_text(json.dumps(facts | sums_of(library)))
    ran = subprocess.run([sys.executable, EXAMPLE, library], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == (
        f"{library} is built for znver9: this CPU has no avx2048; build it here, or for a CPU like"
        " this one\n"
    )


def test_token_ids_positions_lengths_and_masks_are_drawn_from_what_they_index_and_compare() -> None:
    assert bounds(nets.tokens()) == [(0, 49), None, (1, 6), (1, 6)]
    found = inputs.values(inputs_of(nets.tokens(8)), seed=1)
    assert found["ids"].dtype == np.int32
    assert 30 < found["ids"].max() < 50
    assert 0 <= found["ids"].min() < 20
    assert set(found["mask"].ravel()) == {0, 1}
    assert found["mask"][:, 0].all(), "no row is hidden whole"


def indexed(*steps: Callable[[Net, str], str]) -> Any:
    net, x = Net((2, 3)), "x"
    for step in steps:
        x = step(net, x)
    return net.model(x, inputs=[("x", INT64, [2, 3])])


def table(net: Net, size: int) -> str:
    return net.constant(net.random.normal(0, 1, (size, 4)))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            indexed(
                lambda net, x: net.add("Gather", table(net, 7), net.add("Add", x, net.whole(2)))
            ),
            (-2, 4),
        ),
        (
            indexed(lambda net, x: net.add("Gather", table(net, 7), x), lambda net, x: net.relu(x)),
            (0, 6),
        ),
        (indexed(lambda net, x: net.add("GatherElements", table(net, 5), x, axis=0)), (0, 4)),
        (
            indexed(lambda net, x: net.add("OneHot", x, net.whole(9), net.constant([0.0, 1.0]))),
            (0, 8),
        ),
        (
            indexed(
                lambda net, x: net.add(
                    "Add", net.add("Gather", table(net, 7), x), net.add("Gather", table(net, 3), x)
                )
            ),
            (0, 2),
        ),
        (
            indexed(
                lambda net, x: net.add("Unsqueeze", x, net.whole([2])),
                lambda net, x: net.add("Equal", x, net.whole(range(9))),
                lambda net, x: net.add("Cast", x, to=FLOAT),
            ),
            (0, 8),
        ),
        (indexed(lambda net, x: net.add("Cast", x, to=FLOAT)), None),
        (
            indexed(
                lambda net, x: net.add("Greater", x, net.whole(0)),
                lambda net, x: net.add("Cast", x, to=1),
            ),
            None,
        ),
    ],
)
def test_bounds_follow_an_input_to_what_it_indexes(
    model: Any, expected: inputs.Bounds | None
) -> None:
    assert bounds(model) == [expected]


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize("added", [0, 4])
def test_a_whole_divisor_is_drawn_above_zero(operator: str, added: int) -> None:
    """Division by zero ends the process that checks."""
    net = Net((2, 3))
    divisor = net.add("Add", "x", net.whole(added)) if added else "x"
    y = net.add(operator, net.whole([[7, 8, 9]]), divisor)
    assert bounds(net.model(y, inputs=[("x", INT64, [2, 3])])) == [(1 - added, 9 - added)]


def test_a_divisor_that_is_an_index_as_well_is_drawn_from_what_is_both() -> None:
    net = Net((2, 3))
    model = net.model(
        net.add("Gather", table(net, 7), "x"),
        net.add("Div", net.whole(6), "x"),
        inputs=[("x", INT64, [2, 3])],
    )
    assert bounds(model) == [(1, 6)]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bool", {False, True}), ("int32", {0, 1}), ("uint64", {0, 1}), ("uint8", set(range(256)))],
)
def test_integers_without_bounds_are_masks_and_those_of_eight_bits_are_quantised_values(
    dtype: str, expected: set[int]
) -> None:
    found = inputs.draw(dtype, (64, 64), None, np.random.default_rng(0))
    assert found.dtype == dtype
    assert set(found.ravel().tolist()) == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floating_point_values_are_normal(dtype: str) -> None:
    found = inputs.draw(dtype, (64, 64), None, np.random.default_rng(0))
    assert found.dtype == dtype
    assert abs(float(found.mean())) < 0.1
    assert abs(float(found.std()) - 1) < 0.1


def test_a_single_value_and_an_empty_tensor_are_drawn() -> None:
    generator = np.random.default_rng(0)
    assert inputs.draw("int64", (), None, generator) == 1
    assert inputs.draw("int64", (2, 0), None, generator).shape == (2, 0)
    assert inputs.draw("int64", (), (3, 3), generator) == 3


def test_a_file_of_inputs_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    path, wanted = tmp_path / "given.npz", [{"name": "ids", "shape": [2], "dtype": "int32"}]
    np.savez(path, ids=np.arange(2, dtype=np.int64))
    with pytest.raises(
        BadInput, match=r"given.npz has no array ids of shape \(2,\) and type int32"
    ):
        inputs.read(wanted, path)
    path.write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(BadInput, match=r"given\.npz cannot be read"):
        inputs.read(wanted, path)


@pytest.mark.drill(only=True)
def test_a_model_with_token_ids_is_benchmarked_and_run_on_recorded_inputs(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    path, tokens = tmp_path / "net.onnx", tmp_path / "net.so"
    onnx.save(nets.tokens(), path)
    assert type_in("tuna", "model", "import", "net", path).code == 0
    given, whole = tmp_path / "given.npz", np.ones((2, 6), np.int64)
    np.savez(
        given,
        ids=np.full((2, 6), 49, np.int32),
        mask=whole,
        positions=whole,
        **{"len.1": np.ones(2, np.int64)},
    )
    built = type_in(
        "tuna", "model", "build", "net", "-o", tokens, "--input", given, "--no-rivals", "--json"
    )
    assert built.code == 0, built
    assert next(iter(json.loads(built.out)["errors"])) == "reference on recorded inputs"
    ran = subprocess.run(
        [sys.executable, EXAMPLE, tokens], capture_output=True, text=True, check=True
    )
    assert "(2, 6, 16) float32" in ran.stdout
    facts = json.loads(Path(f"{tokens}.json").read_text())
    assert [one.get("bounds") for one in facts["inputs"]] == [[0, 49], None, [1, 6], [1, 6]]
    assert set(facts["cpu_flags"]) <= set(cpu_model().flags.split()), "built for this CPU"
    for recorded in ([], ["--input", given]):
        timed = type_in("tuna", "benchmark-model", tokens, "--local", "--json", *recorded)
        assert timed.code == 0, timed
    np.savez(given, ids=whole)
    refused = type_in("tuna", "benchmark-model", tokens, "--local", "--input", given)
    assert "given.npz has no array ids of shape (2, 6) and type int32." in refused.err

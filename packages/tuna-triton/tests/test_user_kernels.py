"""Kernels of one's own, out of files, as far as Triton is not needed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuna.errors import BadInput
from tuna.libraries.kernels import Past
from tuna.libraries.search.proposal import propose
from tuna_triton import kernel_import
from tuna_triton.artifact import (
    Artifact,
    BadArtifact,
    Buffer,
    Launch,
    SampledAnswer,
    from_bytes,
)
from tuna_triton.device_problems import DeviceProblem
from tuna_triton.kernel_import import read_kernel
from tuna_triton.space import TileSpace
from tuna_triton.tiles import TARGETS, Tile, tile_of, tile_text
from tuna_triton.triton_kernel import TritonKernelConfig
from tuna_triton.user_file import parse
from tuna_triton.user_kernel import UserKernel, check

EXAMPLES = Path(__file__).parents[3] / "examples" / "triton_kernels"
SOFTMAX = (EXAMPLES / "softmax.py").read_text()
LAYER_NORM = (EXAMPLES / "layer_norm.py").read_text()
SHAPE = {"rows": 48, "columns": 700}
SM90 = TARGETS["sm_90"]


def at(kernel: UserKernel, shape: dict[str, Any]) -> TritonKernelConfig:
    return TritonKernelConfig(kernel.file.kernel.function, tuple(shape.items()), kernel.file.digest)


@pytest.mark.parametrize("text", [SOFTMAX, LAYER_NORM])
def test_a_file_is_taken_apart_and_its_parts_are_the_same_again(text: str) -> None:
    found = parse(text, "kernel.py")
    assert parse(found.text, "kernel.py") == found
    changed = text.replace("    rows, columns = ", "    # another comment\n    rows, columns = ")
    assert parse(changed, "kernel.py").digest != found.digest
    beside = f'{text}\n\nif __name__ == "__main__":\n    import torch\n'
    assert parse(beside, "kernel.py").digest == found.digest
    assert "numpy" not in found.kernel.text
    assert "@triton.jit" not in found.functions
    for part in (found.kernel.text, found.functions, found.text):
        ast.parse(part)


def test_a_kernel_has_helpers_and_shares_its_constants_with_the_reference() -> None:
    found = parse(LAYER_NORM, "layer_norm.py")
    assert found.kernel.function == "layer_norm"
    assert "def load" in found.kernel.text
    assert found.text.count("EPSILON = ") == 1
    assert "EPSILON = tl.constexpr(1e-5)" in found.functions
    check_of(LAYER_NORM)


def test_what_the_file_also_imports_is_left_out() -> None:
    text = SOFTMAX.replace("import numpy as np", "import torch, numpy as np\nfrom os import path")
    found = parse(text, "softmax.py")
    assert found == parse(SOFTMAX, "softmax.py")


def test_a_name_of_python_is_that_of_the_file_where_it_has_one() -> None:
    text = SOFTMAX.replace("import numpy as np", "import numpy as np\nsum = np.prod")
    found = parse(text.replace("raised.sum(axis=1", "sum(raised, axis=1"), "softmax.py")
    assert "sum = np.prod" in found.functions
    assert "sum = " not in parse(text, "softmax.py").functions


def check_of(text: str, shape: dict[str, Any] = SHAPE) -> str:
    """Why the kernel in a text cannot be tuned, without a child."""
    file = parse(text, "softmax.py")
    config = TritonKernelConfig(file.kernel.function, tuple(shape.items()), file.digest)
    return str(check(file.text, "softmax.py", config.to_json())["fault"])


OTHER_KERNEL = "\n\n@triton.jit\ndef other(x_ptr):\n    pass\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("@triton.jit", "", "softmax.py has no kernel"),
        ("\n\ndef arguments", f"{OTHER_KERNEL}\n\ndef arguments", "2 kernels, softmax, other"),
        ("def softmax(", "def softmax(:", "cannot be read as Python"),
        ("@triton.jit", "@triton.heuristics({})\n@triton.jit", "decorator that is not known"),
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, *more", "arguments without a name"),
        ("tl.exp(x - top)", "FACTOR * x", "uses FACTOR, which is defined elsewhere"),
        ("AXES =", "AXIS =", "defines no AXES"),
        ("def grid(", "def grit(", "defines no grid"),
        ("def reference(", "def referenced(", "defines no reference"),
        (
            '{"BLOCK": [256',
            '{"BLOCKS": [256',
            "No argument of softmax in softmax.py takes the axis",
        ),
        (
            '{"BLOCK": [256, 512, 1024, 2048]',
            '{"BLOCK": SIZES',
            "AXES in softmax.py is not a literal",
        ),
        ('{"BLOCK": [256, 512, 1024, 2048]', '{"BLOCK": 256', "not a list of whole numbers"),
        ("[256, 512,", "[256, 256,", "each of them once"),
        ("[256, 512,", "[True, 512,", "not a list of whole numbers"),
        ("[1, 2, 4, 8]", "[1, 3]", "num_warps 3 in softmax.py is not a power of 2 up to 32"),
        ("[1, 2, 4, 8]", "[]", "needs a value or more"),
        ('AXES = {"BLOCK"', 'AXES = {} or {"BLOCK"', "AXES in softmax.py is not a literal"),
        ("[256, 512, 1024, 2048]", f"{list(range(50_000))}", "200000 points, more than 100000"),
        ('"num_warps": 4}', "}", "DEFAULT in softmax.py must have the axes of AXES"),
        ('"num_warps": 4}', '"num_warps": 32}', "has the num_warps 32, which AXES lacks"),
        ("DEFAULT =", "TOLERANCE = 2\nDEFAULT =", "TOLERANCE in softmax.py is not a number"),
        ("import numpy as np", "import cupy as np", "reference in softmax.py uses cupy, and"),
        ("import numpy as np", "from jax import numpy as np", "uses jax, and the functions beside"),
        ("return raised", "import scipy\n    return raised", "uses scipy, and the functions"),
        ("return raised", "return tl.exp(raised)", "uses tl.exp, and the functions beside"),
        ("return raised", "return softmax(raised)", "calls softmax, which is a @triton.jit"),
        (
            "return raised",
            "return helper(raised)",
            "uses helper, which is not a function, constant",
        ),
        ("def grid", "@staticmethod\ndef grid", "grid in softmax.py has a decorator"),
        ("return raised /", f"return {'-' * 3000}raised /", "softmax.py "),
    ],
)
def test_a_bad_file_is_refused_by_name(old: str, new: str, words: str) -> None:
    assert old in SOFTMAX
    with pytest.raises(BadInput) as caught:
        parse(SOFTMAX.replace(old, new), "softmax.py")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"columns": columns,',
            '"columns": columns, "stride": 1',
            "stride, which softmax does not",
        ),
        ('"columns": columns,', "", "takes columns, which neither arguments nor AXES gives"),
        ('"columns": columns,', '"columns": columns, "BLOCK": 1', "BLOCK, which is an axis"),
        ('"columns": columns,', '"columns": True', "columns as True without tl.constexpr"),
        ('"columns": columns,', '"columns": "many"', "columns as 'many' without tl.constexpr"),
        ('"columns": columns,', '"columns": 2**64', "columns as 18446744073709551616"),
        ('"columns": columns,', '"columns": np.nan', "columns as nan"),
        ('"columns": columns,', '"columns": np.zeros(3)', "columns as array"),
        ("    return {", "    return {'x'} or {", "{'x'} instead of a dictionary"),
        ('("input", "fp32"', '("in", "fp32"', "x_ptr as 'in', none of"),
        ('("input", "fp32"', '("input", "float32"', "x_ptr of 'float32', none of fp32, fp16"),
        (
            '("input", "fp32", (rows, columns))',
            '("input", "fp32")',
            "x_ptr as ('input', 'fp32') in",
        ),
        ('("input", "fp32", (rows, ', '("input", "fp32", (0, ', "x_ptr with the shape (0, 700)"),
        (
            '("input", "fp32", (rows, ',
            '("input", "fp32", (rows / 2, ',
            "with the shape (24.0, 700)",
        ),
        ('("output", "fp32"', '("input", "fp32"', "not 1 to 8 outputs"),
        ('("input", "fp32", (rows, ', '("input", "fp32", (1 << 20, ', "734036800 elements in its"),
        ('(shape["rows"],)', 'shape["rows"]', "48 instead of one to three positive numbers"),
        ('(shape["rows"],)', '(shape["rows"], 0)', "(48, 0) instead of one to three positive"),
        ('(shape["rows"],)', '(shape["rows"] / 2,)', "(24.0,) instead of one to three positive"),
        ('(shape["rows"],)', "(1, 70000)", "(1, 70000) instead of one to three positive"),
        ('(shape["rows"],)', "(1, 1, 1, 1)", "(1, 1, 1, 1) instead of one to three positive"),
        ('(shape["rows"],)', '(shape["row"],)', "grid in softmax.py fails for softmax columns=700"),
        ('(shape["rows"],)', '(shape["row"],)', "has no row."),
        ('tile["BLOCK"] < 2 *', 'tile["BLOCK"] + 0 *', "256 instead of True or False"),
        (
            "return tile",
            "return False\n    return tile",
            "leaves no candidate for softmax columns=7",
        ),
        ('tile["BLOCK"] < 2 *', 'tile["BLOK"] < 2 *', "valid in softmax.py fails for softmax colu"),
        ("return raised /", "return raised.T /", "ValueError: operands could not be broadcast"),
        ("return raised / ", "return raised.T if raised.sum() else ", "float64 of shape (700, 48)"),
        (
            "return raised / ",
            "return 1j * raised / ",
            "y_ptr as complex128 of shape (48, 700), and",
        ),
        ("return raised / ", "return raised / 0 * ", "y_ptr with values that are not finite"),
        ("return raised /", "return {'y': 1}\n    raised /", "not the outputs y_ptr"),
        ("return raised /", "raised /", "y_ptr as object of shape ()"),
        (
            "raised = np.exp(",
            "raised = np.exp(1 / 0 + ",
            "fails for softmax columns=700 rows=48: Zer",
        ),
        ("def grid(shape, tile)", "def grid(shape)", "TypeError: grid() takes 1 positional"),
        ("def valid", "valid = 5\ndef wrong", "valid in softmax.py is not a function"),
        ("def valid", "SIZE = np.zeros(-1)\ndef valid", ""),
        ("return tile", "return np.zeros(SIZE) or tile", "uses SIZE"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_functions_are_refused_by_name(old: str, new: str, words: str) -> None:
    assert old in SOFTMAX
    try:
        found = check_of(SOFTMAX.replace(old, new))
    except BadInput as error:
        found = str(error)
    assert words in found
    assert (found == "") == (words == "")
    assert "softmax.py" in found or not words


def test_values_of_numpy_are_numbers_and_arguments_may_be_constants() -> None:
    text = SOFTMAX.replace("columns, BLOCK:", "columns, mode: tl.constexpr, scale, BLOCK:")
    text = text.replace("BLOCK: tl.constexpr)", "BLOCK: tl.constexpr, hint=None)")
    more = '"columns": np.int64(columns), "mode": "fast", "scale": np.float32(0.5),'
    text = text.replace('"columns": columns,', more)
    assert check_of(text) == ""
    kernel = UserKernel(parse(text, "softmax.py"))
    (call,) = kernel.plan(at(kernel, SHAPE), {"BLOCK": 256, "num_warps": 4}, SM90).calls
    assert call.grid == (48, 1, 1)
    assert call.arguments == {
        **{"x_ptr": "x_ptr", "y_ptr": "y_ptr", "columns": 700, "mode": "fast", "scale": 0.5},
        **{"BLOCK": 256, "num_warps": 4},
    }


def test_candidates_are_the_valid_points_and_the_default_is_one_of_them() -> None:
    kernel = UserKernel(parse(SOFTMAX, "softmax.py"))

    def space(columns: int) -> tuple[set[int], Tile | None]:
        found = kernel.space(at(kernel, {"rows": 8, "columns": columns}), SM90)
        return {one["BLOCK"] for one in found.tiles}, found.default

    assert space(4096) == ({256, 512, 1024, 2048}, {"BLOCK": 1024, "num_warps": 4})
    assert space(200) == ({256}, {"BLOCK": 256, "num_warps": 1})
    tile = {"num_warps": 4, "BLOCK": 256}
    assert tile_text(tile) == '{"BLOCK": 256, "num_warps": 4}'
    assert tile_of(tile_text(tile), kernel.tile_names) == tile
    for wrong in ('{"BLOCK": 256}', '{"BLOCK": 256, "num_warps": 4, "x": 1}'):
        with pytest.raises(BadInput, match="no params"):
            tile_of(wrong, kernel.tile_names)


def test_a_search_proposes_each_candidate_once_and_the_default_first() -> None:
    kernel = UserKernel(parse(SOFTMAX, "softmax.py"))
    config = at(kernel, SHAPE)
    space, past = TileSpace(kernel, config, SM90), list[Past]()
    while proposed := propose(space, past, count=5, seed=3, strategy="exhaustive"):
        past += [Past(params, 1.0 + len(past)) for params in proposed]
    assert past[0].params == '{"BLOCK": 1024, "num_warps": 4}'
    assert sorted(one.params for one in past) == sorted(
        tile_text(tile) for tile in kernel.space(config, SM90).tiles
    )
    features = space.features_of(past[0].params, at(kernel, {"rows": 96, "columns": 700}))
    assert features is not None
    assert (features["BLOCK"], features["programs of launch 0"]) == (1024, 96)
    # as the kernels of Tuna's own families call them
    text = SOFTMAX.replace("x_ptr", "a_ptr").replace("y_ptr", "b_ptr")
    other = UserKernel(parse(text.replace("BLOCK", "BLOCK_SIZE_K"), "softmax.py"))
    alike = TileSpace(other, at(other, SHAPE), SM90)
    assert alike.features(next(alike.points())).keys() == {
        *("BLOCK_SIZE_K", "num_warps", "programs of launch 0")
    }
    assert space.features_of('{"BLOCK": 256}') is space.point_of('{"BLOCK": 256}') is None


def test_the_right_answer_is_known_where_the_device_is_checked() -> None:
    kernel = UserKernel(parse(SOFTMAX, "softmax.py"))
    config = at(kernel, {"rows": 3000, "columns": 500})
    plan = kernel.plan(config, {"BLOCK": 256, "num_warps": 4}, SM90)
    (answer,) = kernel.answers(config)
    buffers = {one.name: one for one in plan.buffers}
    problem = DeviceProblem(config, buffers, [answer])
    places = problem.places("y_ptr")
    found = problem.expected("y_ptr", places.checked_rows, places.columns)
    x = problem.inputs["x_ptr"].values()
    assert (x.shape, x.dtype) == ((3000, 500), np.float64)
    assert np.array_equal(x[2999], problem.inputs["x_ptr"].at(2999, np.arange(500)))
    right = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    assert np.allclose(found, right[np.ix_(places.checked_rows, places.columns)], rtol=1e-8)
    assert (len(answer.rows), answer.rows[-1], len(answer.columns)) == (32, 2999, 64)
    assert answer.tolerance == problem.tolerance("y_ptr") == 1e-4
    other = kernel.answers(at(kernel, {"rows": 3001, "columns": 500}))
    with pytest.raises(BadInput, match="other rows"):
        DeviceProblem(config, buffers, other).expected("y_ptr", places.checked_rows, places.columns)


def test_of_a_vector_more_columns_are_known() -> None:
    text = SOFTMAX.replace('("output", "fp32", (rows, columns))', '("output", "i32", (columns,))')
    text = f"TOLERANCE = 0.25\n{text}"
    text = text.replace("return raised /", 'return inputs["x_ptr"].argmax(axis=0)\n    raised /')
    kernel = UserKernel(parse(text, "softmax.py"))
    (answer,) = kernel.answers(at(kernel, {"rows": 3, "columns": 5000}))
    assert (answer.rows, answer.tolerance) == ((0,), 0.25)
    assert 1900 < len(answer.columns) <= 2048
    assert {value for row in answer.values for value in row} == {0.0, 1.0, 2.0}
    assert "i32 of shape" in check_of(text.replace("argmax(axis=0)", "max(axis=0)"))


def test_inputs_of_whole_numbers_are_whole_numbers_for_the_reference() -> None:
    text = SOFTMAX.replace('("input", "fp32"', '("input", "i32"')
    text = text.replace("raised = np.exp(", 'np.zeros(9)[inputs["x_ptr"]]\n    raised = np.exp(')
    assert check_of(text) == ""


def artifact(**change: Any) -> bytes:
    facts = {"buffer": "y", "rows": (0, 2), "columns": (1,), "values": ((1.0,), (2.5,))}
    answer = SampledAnswer(**{**facts, "tolerance": 1e-4, **change})
    launch = Launch(0, "k", (4, 1, 1), 4, 32, 1024, 0, 1, 0, 1, ())
    buffers = (Buffer("x", "bf16", (3, 4), "input"), Buffer("y", "bf16", (3, 4), "output"))
    made = Artifact("sm_90", "3.6.0", "0" * 64, buffers, (launch,), (b"code",), (answer,))
    data = made.to_bytes()
    assert not change or from_bytes(data) == made
    return data


def test_an_answer_travels_with_the_artifact() -> None:
    artifact(tolerance=0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"buffer": "x"}, "x has an answer and is not an output"),
        ({"values": ((1.0,),)}, "does not fit its rows and columns"),
        ({"values": ((1.0,), (1.0, 2.0))}, "does not fit its rows and columns"),
        ({"rows": (), "values": ()}, "does not fit its rows and columns"),
        ({"rows": (0, -1)}, "rows must be whole"),
        ({"values": ((1.0,), (10**400,))}, "too large"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArtifact, match=words):
        artifact(**change)


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([SHAPE, {"columns": 700, "rows": 48}, {"rows": 2, "columns": 9}]))
    return path


def test_a_file_and_its_shapes_become_configs(shapes: Path) -> None:
    found = read_kernel(EXAMPLES / "softmax.py", shapes)
    assert [one.label for one in found.configs] == [
        "softmax columns=700 rows=48",
        "softmax columns=9 rows=2",
    ]
    assert {one.body for one in found.configs} == set(found.bodies) == {found.file.digest}
    assert found.tag == f"softmax-{found.file.digest[:8]}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ('{"rows": 1}', "not a list of shapes"),
        ("[]", "not a list of shapes"),
        ('[{"rows": 1}, 3]', "not a list of shapes"),
        ('[{"rows": NaN}]', "NaN is not a number"),
        ('[{"rows": 1, "columns": 1}, {"rows": [1]}]', "Shape 2 of .*: rows must be a number"),
        ('[{"rows": 1, "columns": 1}, {"columns": 5}]', "softmax columns=5: the shape has no rows"),
        ('[{"rows": 300000000, "columns": 1}]', "600000000 elements in its inputs and outputs"),
        ("[{}]", "Shape 1 of .*: a shape has one size"),
        (json.dumps([{"rows": 1}] * 10_001), "10001 shapes, more than 10000"),
    ],
)
def test_bad_shapes_are_refused(shapes: Path, text: str, words: str) -> None:
    shapes.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_kernel(EXAMPLES / "softmax.py", shapes)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path, shapes: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_kernel(tmp_path / "none.py", shapes)
    (tmp_path / "no.py").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_kernel(tmp_path / "no.py", shapes)
    (tmp_path / "no.py").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(BadInput, match="longer than"):
        read_kernel(tmp_path / "no.py", shapes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("while True: pass", r"took more than 1.5 s for softmax columns=700 rows=48"),
        ("__import__('os')._exit(3)", "ended at softmax columns=700 rows=48: .* exit code 3"),
        (f"open({str(EXAMPLES / 'shapes.json')!r})", "fails for softmax .*: PermissionError"),
        ("np.zeros(1 << 40)", "fails for softmax .*: .*MemoryError"),
    ],
)
def test_functions_run_in_a_box(
    tmp_path: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    if "took more" in words:
        monkeypatch.setattr(kernel_import, "_SHAPE_S", 1.5)
    path = tmp_path / "softmax.py"
    path.write_text(SOFTMAX.replace("    raised = ", f"    {line}\n    raised = ", 1))
    with pytest.raises(BadInput, match=words):
        read_kernel(path, shapes)

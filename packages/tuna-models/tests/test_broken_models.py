"""What is said of models that cannot be imported: the operator, its node, why, and what to do."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tuna.errors import BadInput
from tuna_models.reading import importer, onnx_files

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
IMAGE = (1, 3, 8, 8)


def node(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    """An operator; names of inputs and outputs are apart by spaces."""
    return helper.make_node(operator, inputs.split(), outputs.split(), name="n", **attributes)


def made(
    *nodes: Any,
    x: Sequence[int] | None = (2, 3),
    outputs: str = "y",
    functions: Sequence[Any] = (),
    edit: Callable[[Any], Any] | None = None,
    **constants: Any,
) -> Any:
    """A model with the input x."""
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info("x", FLOAT, x)],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions)
    if edit is not None:
        edit(model)
    return model


def function(name: str, *nodes: Any, opset: int = 20) -> Any:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, opsets)


def body(*nodes: Any, returns: str = "t") -> Any:
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in returns.split()]
    return helper.make_graph(nodes, "body", [], outputs)


def tensor(**fields: Any) -> Any:
    return TensorProto(**{"name": "w", "data_type": FLOAT, "dims": [3], **fields})


def weight(**fields: Any) -> Any:
    """A model with a constant of these fields."""
    return made(ADD, edit=lambda model: model.graph.initializer.append(tensor(**fields)))


def relu(**edits: Any) -> Any:
    return made(node("Relu", "x"), **edits)


def filled(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


ADD, CONV = node("Add", "x w"), node("Conv", "x w")
CALL = helper.make_node("Mine", ["x"], ["y"], "n", domain="own")
MINE = function("Mine", node("Relu", "a", "b"))

#: Parts of a graph, and what follows "net.onnx cannot be imported: ".
BROKEN: dict[str, tuple[Any, str]] = {
    "no outputs": (relu(outputs=""), "it has no outputs"),
    "an output of nothing": (relu(outputs="q"), "nothing makes its output 'q'"),
    "an output twice": (relu(outputs="y y"), "'y' is the name of an output twice"),
    "a value of nothing": (made(node("Add", "x q")), "Add (n): it reads 'q', which nothing makes"),
    "a value of two": (
        made(node("Relu", "x"), node("Abs", "x")),
        "'y' is the name of Relu (n) and of Abs (n)",
    ),
    "an input anew": (made(node("Relu", "x", "x")), "'x' is the name of an input and of Relu (n)"),
    "a constant anew": (
        made(node("Relu", "x", "w"), ADD, w=filled(3)),
        "'w' is the name of a constant and of Relu (n)",
    ),
    "an input twice": (
        relu(edit=lambda m: m.graph.input.append(m.graph.input[0])),
        "'x' is the name of an input twice",
    ),
    "a cycle": (
        made(node("Add", "x b", "a"), node("Neg", "a", "b"), node("Abs", "b")),
        "operators wait for each other's values: Add (n), Neg (n)",
    ),
    "no operator": (made(node("", "x")), "its node (n) names no operator"),
    "no type": (relu(edit=lambda m: m.graph.input[0].ClearField("type")), "input 'x' has no type"),
    "no shape": (relu(x=None), "its input 'x' has no shape"),
    "too many inputs": (
        made(node("Relu", "x x")),
        "Relu (n): it has 2 inputs, and this operator 1",
    ),
    "too few inputs": (made(node("Conv", "x")), "Conv (n): it has 1 input, and this"),
    "too many outputs": (made(node("Relu", "x", "y z")), "Relu (n): it has 2 outputs, and"),
    "an absent input": (
        made(helper.make_node("Add", ["", "x"], ["y"], "n")),
        "Add (n): its input A is absent",
    ),
    "an absent one of many inputs": (
        made(helper.make_node("Max", ["x", ""], ["y"], "n")),
        "Max (n): one of its inputs data_0 is absent",
    ),
    "a lacking attribute": (made(node("Concat", "x x")), "Concat (n): it lacks the attribute axis"),
    "an attribute of another type": (
        made(node("Softmax", "x", axis="one")),
        "Softmax (n): its attribute axis is of type STRING, not INT",
    ),
    "an unknown attribute": (
        made(node("Relu", "x", speed=3)),
        "Relu (n): it has the attribute 'speed', which this operator has not",
    ),
    "an attribute of no function": (
        made(
            node("Softmax", "x"),
            edit=lambda m: m.graph.node[0].attribute.add(name="axis", ref_attr_name="a", type=2),
        ),
        "Softmax (n): its attribute 'axis' is one of a function around it, and there is none",
    ),
    "an axis beyond": (
        made(node("Softmax", "x", axis=-5)),
        "Softmax (n): 'axis' must be in [-2 , 1]. Its actual value is: -5; its inputs are 'x'"
        " float[2,3]; axis=-5",
    ),
    "shapes that do not fit": (
        made(node("MatMul", "x w"), w=filled(4, 5)),
        "MatMul (n): incompatible dimensions for matrix multiplication; its inputs are 'x'"
        " float[2,3], 'w' float[4,5]",
    ),
    "channels that do not fit": (
        made(CONV, x=IMAGE, w=filled(4, 5, 3, 3)),
        "Conv (n): TVM's importer does not take it so: The channel size of the data should",
    ),
    "a type that does not fit": (
        made(ADD, w=whole(1, 2, 3)),
        "Add (n): its input B is a tensor(int64), unlike the others",
    ),
    "a type that is not taken": (
        made(node("And", "x x")),
        "And (n): its input A cannot be a tensor(float)",
    ),
    "a type of no number": (made(node("Cast", "x", to=99)), "Cast (n): attribute to does not"),
    "a scale of NaN": (
        made(node("QuantizeLinear", "x s z"), s=np.float32(np.nan), z=np.uint8(0)),
        "QuantizeLinear (n): its scale 's' is NaN",
    ),
    "scales of another shape": (
        made(node("QuantizeLinear", "x s"), s=filled(2, 1, 1)),
        "QuantizeLinear (n): its scale or zero point has the shape [2, 1, 1], which is neither",
    ),
    "a scale of 0": (
        made(node("QuantizeLinear", "x s z"), s=np.float32(0), z=np.uint8(0)),
        "QuantizeLinear (n): its scale 's' is 0",
    ),
    "an index beyond": (
        made(node("Gather", "x w"), w=whole(99)),
        "Gather (n): its index 99 is beyond the end of 2",
    ),
    "an axis of CumSum beyond": (
        made(node("CumSum", "x w"), w=np.int64(9)),
        "CumSum (n): its axis 9 is beyond the end of 2",
    ),
    "a slope of another shape": (
        made(node("PRelu", "x w"), w=filled(7)),
        "PRelu (n): its slope of the shape [7] does not broadcast to [2, 3]",
    ),
    "a short constant": (
        weight(raw_data=bytes(8)),
        "the constant 'w' has 8 bytes where the shape [3] of FLOAT needs 12",
    ),
    "a long constant": (weight(raw_data=bytes(80)), "the constant 'w' has 80 bytes where the"),
    "no values": (weight(), "the constant 'w' has 0 values where the shape [3] of FLOAT needs 3"),
    "an undefined type": (weight(data_type=99), "the constant 'w' has the type 99, which ONNX"),
    "a negative extent": (weight(dims=[-3]), "the constant 'w' has the shape [-3]"),
    "a constant without a name": (weight(name="", raw_data=bytes(12)), "a constant in it has no"),
    "a constant of two values": (
        made(node("Constant", "", value_int=1, value_float=2.0)),
        "Constant (n): it has 2 values, and a constant has one",
    ),
    "a short value": (
        made(node("Constant", "", value=tensor(raw_data=bytes(8)))),
        "Constant (n): its attribute 'value' has 8 bytes where the shape [3] of FLOAT needs 12",
    ),
    "functions in a circle": (
        made(CALL, functions=[function("Mine", helper.make_node("Mine", "a", "b", domain="own"))]),
        "its functions call themselves: own.Mine",
    ),
    "two functions": (made(CALL, functions=[MINE, MINE]), "two functions of the name own.Mine"),
    "a call with too much": (
        made(helper.make_node("Mine", ["x", "x"], ["y"], "n", domain="own"), functions=[MINE]),
        "own.Mine (n): it has 2 inputs, and this operator 0 to 1",
    ),
    "a call with too little": (
        made(
            helper.make_node("Mine", [], ["y"], "n", domain="own"),
            functions=[function("Mine", node("Relu", "a", "b"))],
        ),
        "its input X is absent",
    ),
    "a function of nothing": (
        made(CALL, functions=[function("Mine", node("Relu", "a", "c"))]),
        "no operator of its function own.Mine makes 'b'",
    ),
    "a function of another opset": (
        made(CALL, functions=[function("Mine", node("Softmax", "a", "b"), opset=11)]),
        "Softmax (n): it is in the function own.Mine of opset 11, and the model is of opset 20",
    ),
    "a branch of two values": (
        made(
            node(
                "If",
                "c",
                then_branch=body(node("Relu", "x", "t"), node("Abs", "x", "u"), returns="t u"),
                else_branch=body(node("Abs", "x", "t")),
            ),
            c=np.array(True),
        ),
        "If (n): its then_branch returns 2 values, and it has 1",
    ),
    "a branch of nothing": (
        made(
            node(
                "If",
                "c",
                then_branch=body(node("Relu", "q", "t")),
                else_branch=body(node("Abs", "x", "t")),
            ),
            c=np.array(True),
        ),
        "Relu (n): it reads 'q', which nothing makes",
    ),
    "two conditions": (
        made(
            node(
                "If",
                "c",
                then_branch=body(node("Relu", "x", "t")),
                else_branch=body(node("Abs", "x", "t")),
            ),
            c=np.array([True, False]),
        ),
        "If (n): its condition has 2 values",
    ),
    "a loop without its body": (made(node("Loop", "m m"), m=whole(3)), "it lacks the attribute"),
    "an equation of digits": (
        made(node("Einsum", "x", equation="1j->j")),
        "Einsum (n): its equation '1j->j' has more than letters, commas, one -> and dots in threes",
    ),
    "an equation of two": (
        made(node("Einsum", "x", equation="ij,jk->ik")),
        "Einsum (n): it has 1 input, and this operator 2",
    ),
    "an axis that no tensor has": (
        made(node("Softmax", "x", axis=2**31)),
        "Softmax (n): its axis is no axis that a tensor has",
    ),
    "a bias of another length": (
        made(node("Conv", "x w b"), x=IMAGE, w=filled(2, 3, 3, 3), b=filled(5)),
        "Conv (n): its bias has the shape [5], and its weights have 2 channels",
    ),
    "a kernel beyond its input": (
        made(node("Conv", "x w"), x=IMAGE, w=filled(2, 3, 9, 9)),
        "Conv (n): its kernel reaches over 9 values, and its padded input has 8",
    ),
    "scales of another axis": (
        made(node("QuantizeLinear", "x s z", axis=1), s=filled(2), z=np.zeros(2, np.uint8)),
        "QuantizeLinear (n): its scale has the shape [2], which is not one for each of the 3",
    ),
    "another kernel": (
        made(node("Conv", "x w", kernel_shape=[5, 5]), x=IMAGE, w=filled(2, 3, 3, 3)),
        "Conv (n): its kernel_shape is [5, 5], and its weights have [3, 3]",
    ),
    "a pool beyond its input": (
        made(node("MaxPool", "x", kernel_shape=[9, 9]), x=IMAGE),
        "MaxPool (n): its kernel reaches over 9 values, and its padded input has 8",
    ),
    "padding that there is not": (
        made(node("MaxPool", "x", kernel_shape=[2, 2], auto_pad="SOME"), x=IMAGE),
        "MaxPool (n): its auto_pad is 'SOME'",
    ),
    "a layout that there is not": (
        made(node("RNN", "x w r", hidden_size=4, layout=2), w=filled(1, 4, 3), r=filled(1, 4, 4)),
        "RNN (n): its layout is 2",
    ),
    "activations of more layers": (
        made(
            node("RNN", "x w r", hidden_size=4, activations=["Tanh", "Tanh"]),
            x=(5, 1, 3),
            w=filled(1, 4, 3),
            r=filled(1, 4, 4),
        ),
        "RNN (n): it has 2 activations, and 1 are its number",
    ),
    "a state of another batch": (
        made(
            helper.make_node("RNN", ["x", "w", "r", "", "", "h"], ["y"], "n", hidden_size=4),
            x=(5, 1, 3),
            w=filled(1, 4, 3),
            r=filled(1, 4, 4),
            h=filled(1, 2, 4),
        ),
        "RNN (n): its input 'h' has the shape [1, 2, 4], not [1, 1, 4]",
    ),
    "more parts than it says": (
        made(node("Split", "x", "y z", num_outputs=3)),
        "Split (n): its num_outputs are 3, and it has 2 outputs",
    ),
    "another hidden size": (
        made(
            node("RNN", "x w r", hidden_size=5), x=(5, 1, 3), w=filled(1, 4, 3), r=filled(1, 4, 4)
        ),
        "RNN (n): its hidden size is 5, and its weights are for 4",
    ),
    "a zero point of another type": (
        made(
            node("DequantizeLinear", "q s z"),
            q=np.zeros(3, np.int8),
            s=np.float32(1),
            z=np.uint8(0),
        ),
        "DequantizeLinear (n): its zero point is of type uint8, and its input of int8",
    ),
    "channels for no blocks": (
        made(node("DepthToSpace", "x", blocksize=3), x=(1, 4, 2, 2)),
        "DepthToSpace (n): its input has 4 channels, which is no multiple of 3 x 3",
    ),
    "a mode that there is not": (
        made(node("GridSample", "x g", mode="magic"), x=(1, 4, 2, 2), g=filled(1, 2, 2, 2)),
        "GridSample (n): its mode is 'magic'",
    ),
    "weights of one direction": (
        made(
            node("RNN", "x w r", hidden_size=4, direction="bidirectional"),
            x=(5, 1, 3),
            w=filled(1, 4, 3),
            r=filled(1, 4, 4),
        ),
        "RNN (n): its weights of the shape [1, 4, 3] are not for 2 direction(s)",
    ),
    "a scan of too many": (
        made(node("Scan", "x", num_scan_inputs=5, body=body(node("Relu", "x", "t")))),
        "Scan (n): its body takes 0 values and returns 1, which do not fit its 1 input and 1",
    ),
}


@pytest.mark.parametrize(("model", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_graph_is_refused_with_its_operator_and_what_to_do(
    tmp_path: Path, model: Any, reason: str
) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BadInput) as refused:
        importer.to_relax(importer.read(path, {}), path.name)
    assert str(refused.value).startswith("net.onnx cannot be imported: ")
    assert reason in str(refused.value)
    assert refused.value.hint


def archive(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name in names:
            file.writestr(name, b"x")
    return stream.getvalue()


GOOD = relu().SerializeToString()
#: The bytes of files, what follows their names, and a word of what to do.
FILES: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", "is empty.", "fetch it again"),
    "zeros": (bytes(4096), "is not an ONNX model: it begins with zeros alone.", "fetch it again"),
    "noise": (b"\xfe\x07 noise", "is not an ONNX model, nor another file that", "fetch it again"),
    "cut off": (GOOD[:-5], "is not a whole ONNX model: it is cut off or damaged.", "its size"),
    "no operators": (
        helper.make_model(
            helper.make_graph([], "net", [], [helper.make_tensor_value_info("x", FLOAT, [1])])
        ).SerializeToString(),
        "is an ONNX model that lacks operators.",
        "export it again",
    ),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n",
        "is a pointer of Git LFS, not the file that it stands for.",
        "git lfs pull",
    ),
    "HTML": (b"\n<!DOCTYPE html><html>", "is a page of HTML.", "the download went wrong"),
    "JSON": (b'{"error": "not found"}', "is a document of JSON.", "downloaded"),
    "XML": (b'<?xml version="1.0"?><Error>', "is a document of XML.", "downloaded"),
    "OpenVINO": (
        b'<?xml version="1.0"?>\n<net name="n">',
        "is a network of OpenVINO.",
        "ONNX file",
    ),
    "TFLite": (b"\x1c\0\0\0TFL3", "is a model of TFLite.", "tf2onnx"),
    "TensorFlow": (b"\x08\x01\x12\xd2\n\x0bsaved_model", "is a model of TensorFlow.", "tf2onnx"),
    "Keras": (archive("config.json", "model.weights.h5"), "is a model of Keras.", "tf2onnx"),
    "HDF5": (b"\x89HDF\r\n\x1a\n", "is a file of HDF5, such as weights of Keras.", "tf2onnx"),
    "GGUF": (b"GGUF\3\0\0\0", "is a model of GGUF.", "ONNX and torch.export alone"),
    "safetensors": (
        bytes(8) + b'{"w":',
        "is weights of safetensors without a",
        "torch.onnx.export",
    ),
    "pickle": (pickle.dumps([1]), "is a pickle, such as an old checkpoint", "torch.onnx.export"),
    "checkpoint": (archive("a/data.pkl"), "is a checkpoint of PyTorch, which", "torch.onnx.export"),
    "TorchScript": (archive("a/data.pkl", "a/code/a.py"), "is a program of", "torch.onnx.export"),
    "NumPy": (archive("a.npy"), "is an archive of NumPy's arrays.", "export it to ONNX"),
    "packed": (archive("a/n.onnx"), 'is a zip archive with "a/n.onnx" in it.', "unpack it"),
    "half a zip": (archive("a.npy")[:20], "is a zip archive that is cut off", "fetch it again"),
    "gzip": (gzip.compress(GOOD), "is a file compressed by gzip.", "unpack it"),
    "text": (b"ir_version: 10\ngraph {", "is ONNX as text.", "format='textproto'"),
    "a program": (b"\x7fELF\2\1", "is a compiled program or library.", "built of"),
}


@pytest.mark.parametrize(("data", "what", "advice"), FILES.values(), ids=list(FILES))
def test_a_file_that_is_no_model_is_named_for_what_it_is(
    tmp_path: Path, data: bytes, what: str, advice: str
) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(data)
    with pytest.raises(BadInput) as refused:
        importer.read(path, {})
    assert str(refused.value).startswith(f"net.onnx {what}")
    assert advice in refused.value.hint
    if not data.startswith(b"PK") and "lacks operators" not in what:
        with pytest.raises(BadInput) as sent, path.open("rb") as file:
            onnx_files.check_upload("net.onnx", file)
        assert str(sent.value) == str(refused.value)


@pytest.mark.parametrize("answer", ["x", "w"])
def test_an_answer_that_is_an_input_or_a_constant_is_imported(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(made(ADD, outputs=f"{answer} y", w=filled(3)).SerializeToString())
    importer.to_relax(importer.read(path, {}), path.name)

#!/usr/bin/env bash
# onnx 1.23.2: inline_selected_functions(..., inline_schema_functions=True) makes an invalid model of
# a valid one: an attribute that a node leaves to its default is left out of the body, too. Swish
# without alpha becomes a Constant without a value, and no error is raised. Where an optional input
# is absent, as with Attention(q, k, v, ""), it raises "Type unknown for"; a value_info without a
# name helps. Give the node its defaults before it is inlined.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2
cat >"$folder/show.py" <<'PYTHON'
import sys
import onnx
from onnx import TensorProto, checker, defs, helper, inliner


def inlined(node, opset, more=()):
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 3, 4])
               for name in node.input if name]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 3, 4])
    graph = helper.make_graph([node], "net", tensors, [output], value_info=list(more))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    checker.check_model(model)
    return inliner.inline_selected_functions(
        model, [("", node.op_type)], inline_schema_functions=True
    )


def first(node):
    made = inlined(node, 24)
    try:
        checker.check_model(made, full_check=True)
        said = "valid"
    except Exception as error:
        said = str(error).strip().splitlines()[0][-120:]
    print("Swish", [each.name for each in node.attribute], made.graph.node[0].op_type, said)
    return said == "valid"


print("onnx", onnx.__version__)
swish = helper.make_node("Swish", ["x"], ["y"])
without = first(swish)
swish.attribute.append(helper.make_attribute(
    "alpha", defs.get_schema("Swish").attributes["alpha"].default_value.f))
stated = first(swish)
attention = helper.make_node("Attention", ["q", "k", "v", ""], ["y"])
try:
    inlined(attention, 23)
    said = "written out"
except RuntimeError as error:
    said = str(error)[-60:]
print("Attention with an absent input:", said)
helped = len(inlined(attention, 23, [onnx.ValueInfoProto(name="")]).graph.node)
print("with a value_info without a name:", helped, "operators")
seen = not without and stated and "Type unknown" in said and helped > 1
sys.exit("the behaviour has changed" if not seen else 0)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"

"""A model in ONNX as it can be seen without `onnx` and TVM: where its weights are, and which
operators it names.

The file is a stranger's, so it is read field by field. Messages and numbers of fields are those of
onnx.proto3 in onnx/onnx.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO

from tuna.common.messages import one_line
from tuna.errors import BadInput
from tuna_models.arguments import refuse_obstacles
from tuna_models.names import OWN_DOMAINS, operator_name
from tuna_models.reading import file_kinds

#: Fields that are messages, by message.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
#: Texts that are read: name, operator and domain of a node, name and domain of a function.
_TEXTS = {"node": (3, 4, 7), "function": (1, 10)}
#: Field and value of a tensor whose bytes are in another file.
_EXTERNAL = (14, 1)
#: Fields that are looked at, messages in messages (as protobuf has them), different names that are
#: kept, bytes of one.
_MAX_FIELDS, _MAX_DEPTH, _MAX_NAMES, _NAME_BYTES = 300_000, 100, 1000, 200
_NAMES = """
Abs Acos Acosh Add AffineGrid AllClassNMS And ArgMax ArgMin Asin Asinh Atan Atanh Attention
AveragePool BatchNormalization Bernoulli BiasGelu BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr
BitwiseXor BlackmanWindow Cast CastLike CausalConvWithState Ceil Celu CenterCropPad Clip Col2Im
Compress Concat ConcatFromSequence Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh
CumProd CumSum DFT DeformConv DepthToSpace DequantizeLinear Det Div Dropout DynamicQuantizeLSTM
DynamicQuantizeLinear Einsum Elu EmbedLayerNormalization Equal Erf Exp Expand EyeLike FastGelu
Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HammingWindow HannWindow
HardSigmoid HardSwish Hardmax Identity If InstanceNormalization IsInf IsNaN LRN LSTM
LayerNormalization LeakyRelu Less LessOrEqual LinearAttention Log LogSoftmax Loop LpNormalization
LpPool MatMul MatMulInteger MatMulInteger16 Max MaxPool MaxRoiPool MaxUnpool Mean
MeanVarianceNormalization MelWeightMatrix Min Mish Mod Mul Neg NegativeLogLikelihoodLoss
NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement OptionalHasElement Or PRelu Pad Pow
QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN Range Reciprocal ReduceL1 ReduceL2
ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
Relu Reshape Resize ReverseSequence RoiAlign RotaryEmbedding Round STFT Scan Scatter ScatterElements
ScatterND Selu SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
SequenceLength SequenceMap Shape Shrink Sigmoid Sign Sin Sinh Size SkipLayerNormalization Slice
Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze
Sub Sum SwiGLU Swish Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unique
Unsqueeze Upsample Where Xor
"""
#: Operators that TVM's importer or Tuna's converters know, or ONNX defines by others.
OPERATORS = frozenset(_NAMES.split())

#: Quantised operators of onnxruntime's own domain: those that are written as ONNX's, and the one
#: that is converted as it is
QOPERATORS_DOMAIN, DYNAMIC_LSTM = "com.microsoft", "DynamicQuantizeLSTM"
QOPERATORS = frozenset(
    {
        *("QLinearAdd", "QLinearMul", "QLinearConcat", "QGemm", "QLinearSigmoid"),
        *("QLinearLeakyRelu", "QLinearAveragePool", "QLinearGlobalAveragePool"),
        *("QuantizeLinear", "DequantizeLinear"),
    }
)


def check_upload(name: str, file: IO[bytes]) -> None:
    """Raise BadInput for a file that is not a model or is cut off, for weights in another file, and
    for operators that cannot be imported, all of them.

    Operators in branches and loops are not among them: what is never run is not imported.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    model = _Model(name, file)
    try:
        if not size_bytes:
            raise EOFError
        model.read("model", 0, size_bytes, 0)
    except _Enough:  # the import looks at the rest
        return
    except (ValueError, EOFError):
        raise file_kinds.refusal(name, file, inside=False) from None
    refuse_obstacles(name, model.unknown(), {})


class _Enough(Exception):
    """More fields, or more names, than are looked at."""


#: Names of the nodes of each operator, by domain and name, that is not one of ONNX's.
_Foreign = dict[tuple[str, str], list[str]]


class _Model:
    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._file = file
        self._fields = 0
        #: By the function that they are in; None: in the model's own graph.
        self._foreign: dict[tuple[str, str] | None, _Foreign] = {None: {}}

    def unknown(self) -> dict[str, list[str]]:
        """Names of the nodes of each operator that is used and cannot be imported."""
        found: dict[str, list[str]] = {}
        used: list[tuple[str, str] | None] = [None]
        for place in used:  # grows meanwhile
            for operator, nodes in self._foreign[place].items():
                if operator not in self._foreign:
                    found.setdefault(operator_name(*operator), []).extend(nodes)
                elif operator not in used:
                    used.append(operator)
        return found

    def read(self, message: str, at: int, end: int, depth: int) -> dict[int, str]:
        """Read a message of protobuf, return its texts; raises ValueError or EOFError where it is
        none, BadInput for weights in another file, and _Enough."""
        inside, wanted, texts = _INSIDE[message], _TEXTS.get(message, ()), dict[int, str]()
        foreign: _Foreign = {}
        if depth > _MAX_DEPTH:
            raise _Enough
        while at < end:
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise _Enough
            self._file.seek(at)
            tag, at = self._varint(at)
            number = tag >> 3
            if not number:
                raise ValueError("a field without a number")
            match tag & 7:
                case 0:
                    value, at = self._varint(at)
                    if message == "tensor" and (number, value) == _EXTERNAL:
                        raise BadInput(
                            f"{self._name} has weights in a file of their own, which cannot be"
                            " sent.",
                            hint="save the model with its weights in it",
                        )
                    continue
                case 2:
                    length, at = self._varint(at)
                case 1 | 5 as kind:
                    length = 8 if kind == 1 else 4
                case _:
                    raise ValueError("a type of field that ONNX has not")
            if length > end - at:
                raise ValueError("it ends behind its message")
            if tag & 7 == 2 and number in inside:
                inner = self.read(inside[number], at, at + length, depth + 1)
                if inside[number] == "node":
                    _note(foreign, inner)
            elif tag & 7 == 2 and number in wanted:
                text = self._file.read(min(length, _NAME_BYTES)).decode(errors="replace")
                texts[number] = one_line(text)
            at += length
        if message == "function":
            self._foreign[texts.get(10, ""), texts.get(1, "")] = foreign
        elif (message, depth) == ("graph", 1):
            self._foreign[None] |= foreign
        if len(self._foreign) + len(foreign) > _MAX_NAMES:
            raise _Enough
        return texts

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the number there, and the place behind it."""
        value = 0
        for place, byte in enumerate(self._file.read(10)):
            value |= (byte & 127) << 7 * place
            if byte < 128:
                self._file.seek(at + place + 1)
                return value, at + place + 1
        raise EOFError


def is_own(domain: str, operator: str) -> bool:
    """Whether an operator is ONNX's own, or the one of onnxruntime's that is converted as these
    are."""
    return domain in OWN_DOMAINS or (domain, operator) == (QOPERATORS_DOMAIN, DYNAMIC_LSTM)


def _note(foreign: _Foreign, node: Mapping[int, str]) -> None:
    name, operator, domain = (node.get(number, "") for number in _TEXTS["node"])
    known = is_own(domain, operator) and operator in OPERATORS
    if not known and not (domain == QOPERATORS_DOMAIN and operator in QOPERATORS):
        nodes = foreign.setdefault((domain, operator), [])
        if len(nodes) < _MAX_NAMES:
            nodes.append(name or operator)

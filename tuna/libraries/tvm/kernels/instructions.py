"""The instructions of CPUs that kernels are made for, a row each: sets of vector instructions, and
dot products of words of small values. Processes without TVM read these tables too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from tuna.configs.values import DataType

#: Origin of a multiply-add's broadcast operand: memory (AVX-512), a lane of a register that holds
#: several values (NEON), or none: the broadcast is a separate instruction (AVX2)
Broadcast = Literal["memory", "lane", "none"]
#: Number of values in a word of 32 bits, by their type
_IN_WORD = {"uint8": 4, "int8": 4, "uint16": 2, "int16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class InstructionSet:
    """A set of vector instructions."""

    features: frozenset[str]  #: LLVM's names of features, of which a CPU has one; empty: any CPU
    width: int  #: bytes of a vector
    registers: int  #: number of vector registers
    broadcast: Broadcast = "none"


@dataclass(frozen=True)
class DotProduct:
    """An instruction that multiplies the values of a word of the input, which all lanes share, by
    those of each lane's word of weights, and adds up the products of a lane."""

    name: str  #: name of it and of those of other widths
    isa: InstructionSet
    feature: str  #: LLVM's name of the feature that has it
    data_type: DataType  #: type of the layers
    reads: str  #: type of the values of the input, or of a copy of it
    weights: str  #: type of the values of a word of weights
    build: str  #: LLVM's intrinsic, or the function of `text`
    adds: bool = True  #: whether it adds to the sums
    text: str = ""  #: LLVM's text of a function, where TIR cannot call the intrinsic
    rounding: str = ""  #: LLVM's intrinsic that rounds a vector of its sums to bfloat16
    #: type as which words of weights are stored: where one word holds them all, nothing else tells
    #: bytes from numbers of 16 bits
    stored: str = "int32"
    #: registers that a tile leaves free for products which another instruction adds, measured
    spare: int = 0
    #: time of a product, in that of a multiply-add of fp32, measured
    time: float = 1.0

    def __post_init__(self) -> None:
        assert _IN_WORD[self.reads] == _IN_WORD[self.weights], "a word has as many of both"
        assert f"@{self.build}(" in self.text or not self.text, "the text is of another function"
        assert self.data_type is DataType.BF16 or not self.text, "TIR can call it"

    @property
    def word(self) -> int:
        """Number of values in a word."""
        return _IN_WORD[self.weights]

    @property
    def lanes(self) -> int:
        """Number of words in a vector."""
        return self.isa.width // 4


#: SVE's width is not known when compiling: its lower 128 bits are NEON.
NEON = InstructionSet(frozenset({"neon", "sve"}), 16, 32, "lane")
AVX512 = InstructionSet(frozenset({"avx512f"}), 64, 32, "memory")
AVX = InstructionSet(frozenset({"avx"}), 32, 16)
#: Sets by preference: a CPU's is the first that it has
SETS = (NEON, AVX512, AVX, InstructionSet(frozenset(), 16, 16))
#: A function for `vdpbf16ps`, for in a call TIR makes fp32 of bfloat16
_BF16 = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
  <16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @tuna_dpbf16(<16 x float> %sums, <16 x i32> %x, <16 x i32> %w)
  alwaysinline nounwind memory(none) {
  %a = bitcast <16 x i32> %x to <32 x bfloat>
  %b = bitcast <16 x i32> %w to <32 x bfloat>
  %found = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float> %sums, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %found
}
"""
_ROUNDING = "llvm.x86.avx512bf16.cvtneps2bf16.512"
_bytes = partial(DotProduct, data_type=DataType.INT8, reads="uint8", weights="int8")
#: Bytes of twice their size, since the older instruction for bytes saturates
_madd = partial(
    DotProduct,
    "madd",
    data_type=DataType.INT8,
    reads="int16",
    weights="int16",
    adds=False,
    stored="uint32",
    spare=2,
    time=1.2,
)
#: Dot products by preference: a kernel takes the first of its type that a CPU has; the last of a
#: type is the oldest of all
DOTS = (
    DotProduct(
        "bf16",
        AVX512,
        "avx512bf16",
        DataType.BF16,
        "uint16",
        "bfloat16",
        "tuna_dpbf16",
        text=_BF16,
        rounding=_ROUNDING,
    ),
    _bytes("vnni", AVX512, "avx512vnni", build="llvm.x86.avx512.vpdpbusd.512"),
    _bytes("vnni", AVX, "avxvnni", build="llvm.x86.avx512.vpdpbusd.256"),
    _madd(AVX512, "avx512bw", build="llvm.x86.avx512.pmaddw.d.512"),
    _madd(AVX, "avx2", build="llvm.x86.avx2.pmadd.wd"),
)
#: Number of values in a word of weights, by their type; empty: no words
WORDS = {"": 1, **{dot.weights: dot.word for dot in DOTS}}
#: Type as which weights are stored, by that of the values of their words
STORED = {"": "float32", **{dot.weights: dot.stored for dot in DOTS}}
#: Names in /proc/cpuinfo of the instructions that LLVM uses for a target with a feature
FLAGS = {
    **{name: name for name in ("avx", "avx2", "fma", "f16c", "bmi2", "gfni", "sve", "sve2")},
    **{name: name for name in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")},
    **{name: name for name in ("avx512ifma", "avx512vbmi")},
    **{"sse4.2": "sse4_2", "bmi": "bmi1", "avx512vbmi2": "avx512_vbmi2", "avxvnni": "avx_vnni"},
    **{"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16"},
    **{"avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq"},
    **{"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "bf16": "bf16"},
    **{"i8mm": "i8mm", "lse": "atomics"},
}
assert {dot.feature for dot in DOTS} <= FLAGS.keys(), "a feature without its name in cpuinfo"


def dots_of(data_type: DataType) -> list[DotProduct]:
    """Return the dot products for layers of a type."""
    return [dot for dot in DOTS if dot.data_type is data_type]


def word_types(data_type: DataType) -> list[str]:
    """Return the types of words of weights that layers of a type may have, empty for none."""
    return [*dict.fromkeys(dot.weights for dot in dots_of(data_type)), ""]

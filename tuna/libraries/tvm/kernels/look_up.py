"""Functions of a byte as tables of 256 bytes: a vector of bytes looks up all of its values at once,
by one of the instructions here, a row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuna.libraries.tvm.kernels.instructions import FLAGS

#: Number of values of a byte
ENTRIES = 256


def _shuffled(source: str, of: int, places: Sequence[int]) -> str:
    order = ", ".join(f"i32 {place}" for place in places)
    return (
        f"shufflevector <{of} x i8> {source}, <{of} x i8> poison, <{len(places)} x i32> <{order}>"
    )


def _constant(lanes: int, value: int) -> str:
    return "<" + ", ".join([f"i8 {value}"] * lanes) + ">"


def _of_halves(row: LookUp) -> list[str]:
    """Two halves of the table, and the highest bit to choose by; other bits count alone."""
    n, lines = row.lanes, []
    for part in range(ENTRIES // n):
        places = range(part * n, part * n + n)
        lines.append(f"  %t{part} = {_shuffled('%table', ENTRIES, places)}")
    for half in (0, 1):
        lines.append(
            f"  %y{half} = call <{n} x i8> @{row.build}("
            f"<{n} x i8> %t{2 * half}, <{n} x i8> %x, <{n} x i8> %t{2 * half + 1})"
        )
    return [
        *lines,
        f"  %upper = icmp slt <{n} x i8> %x, zeroinitializer",
        f"  %y = select <{n} x i1> %upper, <{n} x i8> %y1, <{n} x i8> %y0",
    ]


def _of_parts(row: LookUp) -> list[str]:
    """Parts of the table, each of which answers zero beyond its entries, one or the other."""
    n, lines, size = row.lanes, list[str](), row.part
    for part in range(ENTRIES // size):
        lines.append(f"  %x{part} = sub <{n} x i8> %x, {_constant(n, part * size)}")
        if row.saturates:  # the instruction counts four bits, and looks at the highest one
            lines.append(
                f"  %i{part} = call <{n} x i8> @llvm.uadd.sat.v{n}i8("
                f"<{n} x i8> %x{part}, <{n} x i8> {_constant(n, 128 - size)})"
            )
            places = [part * size + lane % size for lane in range(n)]
            lines.append(f"  %t{part} = {_shuffled('%table', ENTRIES, places)}")
            given = f"<{n} x i8> %t{part}, <{n} x i8> %i{part}"
        else:
            vectors = []
            for at in range(part * size, part * size + size, n):
                lines.append(f"  %t{at} = {_shuffled('%table', ENTRIES, range(at, at + n))}")
                vectors.append(f"<{n} x i8> %t{at}")
            given = ", ".join([*vectors, f"<{n} x i8> %x{part}"])
        lines.append(f"  %y{part} = call <{n} x i8> @{row.build}({given})")
        before = f"%r{part - 1}" if part else "zeroinitializer"
        lines.append(f"  %r{part} = or <{n} x i8> {before}, %y{part}")
    return [*lines, f"  %y = or <{n} x i8> %r{ENTRIES // size - 1}, zeroinitializer"]


@dataclass(frozen=True)
class LookUp:
    """An instruction that looks up bytes."""

    feature: str  #: LLVM's name of the feature that has it
    lanes: int  #: bytes of a vector
    part: int  #: entries that it knows
    build: str  #: LLVM's intrinsic
    given: int  #: number of its arguments
    body: Callable[[LookUp], list[str]]
    saturates: bool = False  #: whether the highest bit of a byte makes its answer zero

    @property
    def name(self) -> str:
        """The name of the function of a vector and a table."""
        return f"tuna_look_up{self.lanes}"

    @property
    def text(self) -> str:
        """LLVM's text of the function."""
        n = self.lanes
        vectors = ", ".join([f"<{n} x i8>"] * self.given)
        lines = [f"declare <{n} x i8> @{self.build}({vectors})"]
        if self.saturates:
            lines.append(f"declare <{n} x i8> @llvm.uadd.sat.v{n}i8(<{n} x i8>, <{n} x i8>)")
        lines += [
            f"define linkonce_odr <{n} x i8> @{self.name}(<{n} x i8> %x, <{ENTRIES} x i8> %table)",
            "  alwaysinline nounwind memory(none) {",
            *self.body(self),
            f"  ret <{n} x i8> %y",
            "}",
        ]
        return "\n".join(lines)


#: By preference; a CPU without any looks up byte by byte
LOOK_UPS = (
    LookUp("avx512vbmi", 64, 128, "llvm.x86.avx512.vpermi2var.qi.512", 3, _of_halves),
    LookUp("avx512bw", 64, 16, "llvm.x86.avx512.pshuf.b.512", 2, _of_parts, saturates=True),
    LookUp("avx2", 32, 16, "llvm.x86.avx2.pshuf.b", 2, _of_parts, saturates=True),
    LookUp("neon", 16, 64, "llvm.aarch64.neon.tbl4.v16i8", 5, _of_parts),
)
assert {row.feature for row in LOOK_UPS} <= FLAGS.keys(), "a feature without its name in cpuinfo"

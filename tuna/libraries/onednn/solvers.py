"""The solvers of the oneDNN library: a family of its implementations with a layout of the tensors.
Loads no oneDNN."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tuna.libraries.base import Solver


class Layout(str, Enum):
    """Layouts of input and answer in memory."""

    PLAIN = "Plain"  #: channels first, row by row; of a matrix product as the layer says
    CHANNELS_LAST = "ChannelsLast"
    ANY = "Any"  #: as the implementation chooses, mostly in blocks of channels


@dataclass(frozen=True)
class ImplementationFamily:
    """Implementations of one kind, whatever the instruction set; `pattern` is searched in oneDNN's
    names."""

    name: str
    pattern: str
    algorithm: str


#: The first whose pattern is found counts. Names are such as `brgconv_1x1:avx2`,
#: `jit_dw:avx512_core`, `x64:gemm:jit`.
FAMILIES: Mapping[str, Sequence[ImplementationFamily]] = {
    "convolution": (
        ImplementationFamily("Winograd", r"wino", "Winograd"),
        ImplementationFamily("Brdgmm", r"brdgmm", "Direct"),
        ImplementationFamily("Brgconv", r"\bbrg", "Direct"),
        ImplementationFamily("Gemm", r"\bgemm\b", "GEMM"),
        ImplementationFamily("Jit", r"\bjit", "Direct"),
        ImplementationFamily("Ref", r"\bref", "Direct"),
        ImplementationFamily("Other", r"", "Direct"),
    ),
    "gemm": (
        ImplementationFamily("Brgemm", r"\bbrg", "GEMM"),
        ImplementationFamily("Gemm", r"\bgemm\b", "GEMM"),
        ImplementationFamily("Jit", r"\bjit", "GEMM"),
        ImplementationFamily("Ref", r"\bref", "GEMM"),
        ImplementationFamily("Other", r"", "GEMM"),
    ),
}
_LAYOUTS = {"convolution": tuple(Layout), "gemm": (Layout.PLAIN, Layout.ANY)}
_PREFIX = {"convolution": "OneDnn", "gemm": "OneDnnMatmul"}


def solver_name(kind: str, family: str, layout: Layout) -> str:
    """Such as `OneDnnBrgconvAny` or `OneDnnMatmulGemmPlain`."""
    return f"{_PREFIX[kind]}{family}{layout.value}"


#: Every solver. Tunable: where oneDNN lists several implementations of a family (AVX2, SSE4.1),
#: each is a candidate.
SOLVERS: tuple[Solver, ...] = tuple(
    Solver(name=solver_name(kind, family.name, layout), kinds=(kind,), algorithm=family.algorithm)
    for kind, families in FAMILIES.items()
    for family in families
    for layout in _LAYOUTS[kind]
)
_LAYOUT_OF: Mapping[str, Layout] = {
    solver_name(kind, family.name, layout): layout
    for kind, families in FAMILIES.items()
    for family in families
    for layout in _LAYOUTS[kind]
}


def family_of(kind: str, implementation: str) -> str:
    """The name of the family to which an implementation belongs."""
    return next(
        family.name for family in FAMILIES[kind] if re.search(family.pattern, implementation)
    )


def layout_of(solver: str) -> Layout:
    """The layout of a solver; raises KeyError for an unknown one."""
    return _LAYOUT_OF[solver]


def by_solver(kind: str, listed: Mapping[Layout, Sequence[str]]) -> dict[str, list[str]]:
    """The implementations of each solver that applies, from those that oneDNN lists for each
    layout.

    Its reference implementations are slower by orders of magnitude: they apply only where there is
    nothing else.
    """
    found: dict[str, list[str]] = {}
    only_references = all(is_reference(name) for names in listed.values() for name in names)
    for layout, implementations in listed.items():
        for name in implementations:
            if only_references or not is_reference(name):
                found.setdefault(solver_name(kind, family_of(kind, name), layout), []).append(name)
    return found


def is_reference(implementation: str) -> bool:
    """Whether it is one of oneDNN's plain loops, which are there for every layer."""
    return implementation.startswith("ref")


def has_exact_int8(implementation: str, has_vnni: bool) -> bool:
    """Whether a convolution of int8 keeps every bit, on a CPU with or without VNNI.

    Where an implementation does without VNNI, oneDNN halves the weights, lest sums of two products
    overflow 16 bits: section "Nuances of int8 Computations" of its guide. Such implementations are
    listed on CPUs with VNNI too, after the others.
    """
    without_vnni = re.search(r":(sse41|avx|avx2|avx512_core)$", implementation)
    return is_reference(implementation) or (has_vnni and not without_vnni)


def allowed(kind: str, channels_last: bool, native: bool) -> Collection[Layout]:
    """The layouts that a session's condition `layouts` allows for a layer whose tensors lie
    channels last, or first."""
    if native:
        return _LAYOUTS[kind]
    return (Layout.CHANNELS_LAST,) if kind == "convolution" and channels_last else (Layout.PLAIN,)

"""oneDNN as a library of Tuna: its solvers, families of its implementations with a layout of the
tensors, and where each applies. This process never loads oneDNN: children of the sandbox do."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, ClassVar

from tuna.common.cpu import cpu_model
from tuna.common.messages import install_extra
from tuna.configs import Config
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.base import Environment, Solver
from tuna.libraries.cached_probe import cached_probe
from tuna.libraries.one_step import OneStepLibrary
from tuna.libraries.options import LAYOUTS, Condition, complete
from tuna.sandbox.cores import eval_cpus
from tuna.sandbox.discovery import CPU
from tuna.sandbox.processes import Child, ChildFault, child_env

#: The wheel that holds the library. Intel's own of later years need 600 MB of runtimes.
_WHEEL = "onednn-cpu-gomp"
_FILE = "libdnnl.so.3"
_HINT = install_extra("onednn")
_TIMEOUT_S = 180.0
_MEMORY_BYTES = 4 << 30
_CHILD = "tuna_onednn.implementations"
#: Configs in one request to a child; each takes some milliseconds.
_BATCH = 100


class Layout(str, Enum):
    """Layouts of input and answer in memory."""

    PLAIN = "Plain"  #: channels first, row by row; of a matrix product as the layer says
    CHANNELS_LAST = "ChannelsLast"
    ANY = "Any"  #: the implementation's choice, mostly blocks of channels


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


def family_of(kind: str, implementation: str) -> str:
    """The name of the family to which an implementation belongs."""
    return next(
        family.name for family in FAMILIES[kind] if re.search(family.pattern, implementation)
    )


def layout_of(solver: str) -> Layout:
    """The layout of a solver."""
    return next(layout for layout in Layout if solver.endswith(layout.value))


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


def library_path() -> Path:
    """The library's file in this Python's installation; raises LibraryMissing."""
    try:
        found = files(_WHEEL) or []
    except PackageNotFoundError:
        found = []
    for path in (Path(str(file.locate())) for file in found if file.name == _FILE):
        if path.exists():
            return path.resolve()
    raise LibraryMissing("oneDNN is not installed.", hint=_HINT)


@contextlib.contextmanager
def _asking() -> Iterator[Callable[..., Mapping[str, Any]]]:
    """Yield the calls of a child that may load oneDNN, on this process's cores; they raise
    LibraryMissing where it cannot be used."""
    child = Child(_CHILD, env=child_env({"OMP_NUM_THREADS": "1"}), memory_bytes=_MEMORY_BYTES)

    def ask(op: str, **arguments: Any) -> Mapping[str, Any]:
        try:
            return child.call({"op": op, **arguments}, _TIMEOUT_S)
        except ChildFault as error:
            raise LibraryMissing(f"oneDNN cannot be used here: {error}.", hint=_HINT) from error

    try:
        yield ask
    finally:
        child.close()


@functools.cache  # it does not change while this process lives
def _facts(path: Path) -> Mapping[str, str]:
    with _asking() as ask:
        return {name: str(value) for name, value in ask("describe", path=str(path)).items()}


class OneDnnLibrary(OneStepLibrary):
    """Measures oneDNN's implementations on this machine's CPU. There is one step: its code is
    generated where it runs."""

    name = "onednn"
    kinds = ("convolution", "gemm")
    device_kind = CPU
    conditions: Sequence[Condition] = (*OneStepLibrary.conditions, LAYOUTS)
    builder = f"{_CHILD}:OneDnnBuilder"
    loader = f"{_CHILD}:OneDnnLoader"
    suffix: ClassVar[str] = ".json"
    #: importing the loader does not load oneDNN, so there are no threads yet
    forkable: ClassVar[bool] = True

    def environment(self) -> Environment:
        """CPU, measuring cores and oneDNN's version."""
        path, cpu = library_path(), cpu_model()
        file = path.stat()
        facts = cached_probe(
            "onednn",
            [str(path), file.st_size, file.st_mtime_ns, cpu.name, cpu.digest],
            lambda: _facts(path),
        )
        return Environment(
            library="onednn",
            library_version=facts["version"],
            arch=facts["isa"],
            num_cu=len(eval_cpus()),
            toolchain=f"onednn-{facts['version']}",
            device=cpu.name,
            flags={"cpu_flags": cpu.digest, "cpu_runtime": facts["runtime"]},
        )

    def solvers(self) -> Sequence[Solver]:
        """Every family of implementations with every layout."""
        return SOLVERS

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """Return the solvers that oneDNN lists on this machine; raises BadInput for a session of
        another CPU or version."""
        here = self.environment()
        for what in ("library_version", "arch"):
            there = getattr(environment, what)
            if there != getattr(here, what):
                raise BadInput(
                    f"The session's {what.replace('_', ' ')} is {there}, and here it is"
                    f" {getattr(here, what)}.",
                    hint=(
                        "oneDNN lists its implementations only on such a machine: work it out there"
                    ),
                )
        native = complete(self.conditions, environment.conditions)["layouts"] == "native"
        return self._applicable(iter(configs), native)

    def child_variables(self, threads: int) -> Mapping[str, str]:
        """Each thread stays on its core; generated code is kept for the last few primitives
        only."""
        bound = {
            "OMP_PROC_BIND": "true",
            "OMP_DYNAMIC": "false",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        }
        return {**super().child_variables(threads), **bound}

    def _applicable(
        self, configs: Iterator[Config], native: bool
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        path = str(library_path())
        with _asking() as ask:
            while batch := list(itertools.islice(configs, _BATCH)):
                known = [config for config in batch if config.kind in self.kinds]
                facts = [config.to_json() for config in known]
                answer = ask("applicable", path=path, configs=facts, native=native)
                names = dict(zip((config.key for config in known), answer["solvers"], strict=True))
                yield from ((config, names.get(config.key, [])) for config in batch)

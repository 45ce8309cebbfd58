"""Compiles candidates for a GPU that need not be there; runs in the compile child, and only this
module imports Triton."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from tuna.errors import BadInput
from tuna.libraries.kernels import Builder, KernelJob, SearchRound
from tuna.libraries.search import proposal
from tuna_triton.artifact import (
    GLOBAL_SCRATCH,
    PARAM_BYTES,
    PROFILE_SCRATCH,
    Artifact,
    BadArtifact,
    Launch,
    Param,
    from_bytes,
)
from tuna_triton.descriptions import DEFAULT, DESCRIPTIONS, TunedKernel
from tuna_triton.kernel_file import KernelFile
from tuna_triton.space import TileSpace
from tuna_triton.tiles import (
    OPTIONS,
    TARGETS,
    Element,
    KernelCall,
    Plan,
    Target,
    Tile,
    Value,
    tile_of,
    tile_text,
)
from tuna_triton.triton_kernel import TritonKernelConfig
from tuna_triton.user_kernel import user_kernel

#: Compiled kernels that a child keeps, some 60 kB each: configs that differ in a batch size alone
#: share most of theirs.
_KEPT = 2048
#: Spaces that are kept: those of searches that go on beside each other take turns.
_KEPT_SPACES = 32
_TL = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
_PTX_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)\b[^,)]*_param_\d+")
_PTX_TYPES = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "f64": 8}
_HSACO_ARG = re.compile(r"\.size:\s+(\d+)\n\s+\.value_kind:\s+(\w+)")
_INT32, _INT64 = range(-(2**31), 2**31), range(-(2**63), 2**63)


class TooLarge(Exception):
    """The candidate needs more shared memory than the architecture has."""


@dataclass(frozen=True)
class Source:
    """The input of a build: all that the code depends on, so that equal sources share a build."""

    kernel: KernelFile
    arch: str
    #: Type of each argument, or "constexpr", in the kernel's order.
    types: tuple[str, ...]
    #: Value of each argument that is a constant, None for the others.
    constants: tuple[Any, ...]
    #: Triton's attributes of each argument, such as D (divisible by 16); empty: none.
    hints: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def facts(self) -> tuple[object, ...]:
        """The fields, with the kernel by its digest: their `repr` is that of every process."""
        kernel = self.kernel.digest, self.kernel.function
        return *kernel, self.arch, self.types, self.constants, self.hints, self.options


@dataclass(frozen=True)
class Binary:
    """GPU code of one source, with what a launch of it needs."""

    code: bytes
    symbol: str
    num_warps: int
    shared_bytes: int
    #: Bytes and alignment of global scratch, then of profile scratch.
    scratch: tuple[int, int, int, int]


class TritonBuilder(Builder):
    """Proposes the points of a kernel's space and compiles them."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        """The consumer's default, then points of the space in an order that the job's seed
        decides."""
        description, target = _description(job), TARGETS[job.target]
        description.answers(job.config)  # no candidate's time
        space = description.space(job.config, target)
        first = [] if space.default is None else [tile_text(space.default)]
        if job.solver.endswith(DEFAULT):
            return first
        rest = [text for text in map(tile_text, space.tiles) if text not in first]
        random.Random(job.seed).shuffle(rest)  # noqa: S311
        return [*first, *rest][: job.count]

    def search(self, job: KernelJob, asked: SearchRound) -> Sequence[str]:
        """Propose candidates by `search.proposal`."""
        return proposal.propose(
            _space(job),
            asked.history,
            count=asked.count,
            seed=job.seed,
            strategy=job.options.get("strategy", "search"),
            others=asked.known,
            prior=asked.prior,
        )

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """Write the artifact of one candidate."""
        path.write_bytes(artifact(*_candidate(job, params)).to_bytes())

    def workload(self, job: KernelJob) -> bytes:
        """Compute the right answer where artifacts hold it, so that this takes no time of a
        candidate; exporters need no description."""
        _description(job).answers(job.config)
        return b""

    def build_key(self, job: KernelJob, params: str) -> str:
        """Return the SHA-256 of all that the code depends on: neither grids nor the values of
        arguments, so that batch sizes share it."""
        _, sources = _sources(*_candidate(job, params))
        text = repr([triton.__version__, *(one.facts for one in sources)])
        return hashlib.sha256(text.encode()).hexdigest()

    def rebuild(self, job: KernelJob, params: str, built: Path, path: Path) -> None:
        """Write the artifact of one candidate with the code of another one."""
        code = from_bytes(built.read_bytes())
        path.write_bytes(artifact(*_candidate(job, params), code).to_bytes())


@functools.lru_cache(maxsize=_KEPT_SPACES)
def _space(job: KernelJob) -> TileSpace:
    return TileSpace(_description(job), job.config, TARGETS[job.target])


def _description(job: KernelJob) -> TunedKernel:
    if isinstance(job.config, TritonKernelConfig):
        return user_kernel(Path(job.body).read_text())
    return DESCRIPTIONS[job.solver.removesuffix(DEFAULT)]


def _candidate(job: KernelJob, params: str) -> tuple[TunedKernel, KernelJob, Tile]:
    description = _description(job)
    return description, job, tile_of(params, description.tile_names)


def artifact(
    description: TunedKernel, job: KernelJob, tile: Tile, code: Artifact | None = None
) -> Artifact:
    """Return the candidate compiled, or with the code of an artifact that has its build key; raises
    TooLarge where it cannot run, before it is compiled if its tiles alone are too large."""
    target, kernel = TARGETS[job.target], _kernel(description)
    plan, sources = _sources(description, job, tile)
    least = description.least_shared_bytes(plan, tile, target)
    if least > target.shared_bytes:
        raise TooLarge(_too_large(f"at least {least}", target))
    launches: list[Launch] = []
    binaries: list[bytes] = []
    for number, (call, source) in enumerate(zip(plan.calls, sources, strict=True)):
        binary = compiled(source) if code is None else _binary_of(code, number)
        if binary.shared_bytes > target.shared_bytes:
            raise TooLarge(_too_large(str(binary.shared_bytes), target))
        launches.append(_launch(source, binary, call, number))
        binaries.append(binary.code)
    made = Artifact(
        target.arch,
        triton.__version__,
        kernel.digest,
        plan.buffers,
        tuple(launches),
        tuple(binaries),
        description.answers(job.config),
    )
    if code is not None and _interface(code) != _interface(made):
        raise BadArtifact("the artifact is of another kernel")
    return made


def _sources(description: TunedKernel, job: KernelJob, tile: Tile) -> tuple[Plan, list[Source]]:
    """Return the launches of a candidate, and the build of each."""
    target, kernel = TARGETS[job.target], _kernel(description)
    plan = description.plan(job.config, tile, target)
    return plan, [specialise(kernel, plan, call, target) for call in plan.calls]


def _binary_of(code: Artifact, number: int) -> Binary:
    """Return the binary that a launch of an artifact has."""
    if number >= len(code.launches):
        raise BadArtifact("the artifact has fewer launches than the candidate")
    one = code.launches[number]
    scratch = (
        *(one.global_scratch_bytes, one.global_scratch_align),
        *(one.profile_scratch_bytes, one.profile_scratch_align),
    )
    return Binary(code.binaries[one.binary], one.symbol, one.num_warps, one.shared_bytes, scratch)


def _interface(made: Artifact) -> object:
    """Return what artifacts with one build key have in common besides their code."""
    params = [[(param.name, param.type) for param in one.params] for one in made.launches]
    return made.arch, made.triton, made.kernel_file, params


def _too_large(size: str, target: Target) -> str:
    return (
        f"the candidate needs {size} bytes of shared memory, and {target.arch} has"
        f" {target.shared_bytes}"
    )


def specialise(kernel: KernelFile, plan: Plan, call: KernelCall, target: Target) -> Source:
    """Return the build that Triton's JIT would make of these arguments.

    Integers that are 1 and pointers that are None become constants; addresses, and integers that
    are divisible by 16, are marked as such. Raises BadInput for an argument that is not known.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    types, constants, hints = [], [], []
    for name in kernel.arguments:
        value, free = argument(kernel, call, name), name not in kernel.unspecialised
        constant, kind, hint = None, "constexpr", ""
        if name in kernel.constants or value is None or isinstance(value, Element):
            constant = value
        elif isinstance(value, str):
            buffer = buffers[value]
            kind, hint = "*" + buffer.element, "D"
            # as its JIT says it of tensors that 32 bits can address
            if target.backend == "hip" and buffer.bytes <= 2**31 - 1:
                hint = "DS"
        elif isinstance(value, float):
            kind = "fp32"
        elif isinstance(value, bool):
            raise BadInput(f"The argument {name} is a bool: declare it as tl.constexpr.")
        elif value == 1 and free:
            constant = 1
        else:
            kind = "i32" if value in _INT32 else "i64" if value in _INT64 else "u64"
            hint = "D" if value % 16 == 0 and free else ""
        types.append(kind)
        constants.append(constant)
        hints.append(hint)
    values = ((name, call.arguments.get(name)) for name in OPTIONS)
    options = tuple((name, value) for name, value in values if isinstance(value, int))
    return Source(kernel, target.arch, tuple(types), tuple(constants), tuple(hints), options)


def argument(kernel: KernelFile, call: KernelCall, name: str) -> Value:
    """Return an argument's value, which is the kernel's own default for what is not known; raises
    BadInput without one."""
    defaults = dict(kernel.defaults)
    if name not in call.arguments and name not in defaults:
        raise BadInput(
            f"The kernel {kernel.function} takes {name}, which this version of Tuna does not know."
        )
    return call.arguments.get(name, defaults.get(name))


@functools.lru_cache(maxsize=_KEPT)
def compiled(source: Source) -> Binary:
    """Return the GPU code of a build; raises BadInput where its parameters are not those of the
    source."""
    target = TARGETS[source.arch]
    gpu = GPUTarget(
        target.backend,
        int(source.arch[3:]) if target.backend == "cuda" else source.arch,
        target.warp_size,
    )
    backend = make_backend(gpu)
    function = _function(source.kernel)
    signature = dict(zip(source.kernel.arguments, source.types, strict=True))
    constants = {
        (at,): _TL[value.name] if isinstance(value, Element) else value
        for at, (kind, value) in enumerate(zip(source.types, source.constants, strict=True))
        if kind == "constexpr"
    }
    hints = {(at,): backend.parse_attr(hint) for at, hint in enumerate(source.hints) if hint}
    with tempfile.TemporaryDirectory() as cache:
        with knobs.cache.scope(), knobs.compilation.scope():
            knobs.cache.dir = cache
            knobs.compilation.disable_line_info = True  # it holds paths of this machine
            made = triton.compile(
                ASTSource(function, signature, constants, hints),
                target=gpu,
                options=dict(source.options),
            )
            assembly = dict(made.asm)
    facts = made.metadata
    if facts.num_ctas != 1 or facts.launch_cooperative_grid or getattr(facts, "launch_pdl", False):
        raise BadInput("Clusters, cooperative grids and dependent launches cannot be launched yet.")
    binary = Binary(
        code=assembly["hsaco" if target.backend == "hip" else "cubin"],
        symbol=facts.name,
        num_warps=facts.num_warps,
        shared_bytes=facts.shared,
        scratch=(
            getattr(facts, "global_scratch_size", 0),
            getattr(facts, "global_scratch_align", 1),
            getattr(facts, "profile_scratch_size", 0),
            getattr(facts, "profile_scratch_align", 1),
        ),
    )
    stated = parameter_bytes(assembly, target)
    known = [PARAM_BYTES[kind] for kind in _param_types(source)]
    if stated != [*known, 8, 8]:
        raise BadInput(
            f"The compiled kernel takes parameters of {stated} bytes, and not {[*known, 8, 8]}."
        )
    return binary


def parameter_bytes(assembly: Mapping[str, Any], target: Target) -> list[int]:
    """Return the size of each parameter of the compiled kernel, by its PTX or its AMD metadata."""
    if target.backend == "hip":
        text = str(assembly["amdgcn"])
        found = _HSACO_ARG.findall(text[text.index("amdhsa.kernels") :])
        return [int(size) for size, kind in found if not kind.startswith("hidden_")]
    text = str(assembly["ptx"])
    entry = text[text.index(".entry") :]
    return [_PTX_TYPES[one] for one in _PTX_PARAM.findall(entry[: entry.index("{")])]


def _param_types(source: Source) -> Iterator[str]:
    return ("ptr" if one.startswith("*") else one for one in source.types if one != "constexpr")


def _launch(source: Source, binary: Binary, call: KernelCall, number: int) -> Launch:
    params = []
    for name, kind in zip(source.kernel.arguments, source.types, strict=True):
        value = argument(source.kernel, call, name)
        if kind.startswith("*"):
            params.append(Param(name, "ptr", buffer=str(value)))
        elif kind != "constexpr":
            assert isinstance(value, int | float)
            params.append(Param(name, kind, value=value))
    params += [Param(name, "ptr", buffer=name) for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH)]
    return Launch(
        number,
        binary.symbol,
        call.grid,
        binary.num_warps,
        TARGETS[source.arch].warp_size,
        binary.shared_bytes,
        *binary.scratch,
        tuple(params),
    )


@functools.cache
def _kernel(description: TunedKernel) -> KernelFile:
    found = description.kernel()
    if found is None:
        raise BadInput(f"The package of {description.name} is not installed here.")
    return found


@functools.cache
def _function(kernel: KernelFile) -> Any:
    """The kernel as a function of Triton's, from a file as its JIT demands."""
    name = f"tuna_kernel_{kernel.digest[:16]}"
    path = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))) / f"{name}.py"
    path.write_text(kernel.text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.function)

"""Triton kernels as a library of Tuna. This process never imports Triton: a child of the sandbox
does."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from tuna.common.messages import install_extra
from tuna.configs import Config
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.abilities import CrossCompiling, check_facts
from tuna.libraries.base import Environment, Finals, Solver
from tuna.libraries.contest import Budgets
from tuna.libraries.options import Condition
from tuna.libraries.params_text import ParamsText
from tuna.libraries.searching import SearchingLibrary
from tuna.sandbox.discovery import Device, discover
from tuna.vocabulary import BASELINE
from tuna_triton.descriptions import DEFAULT, DESCRIPTIONS, USER_KERNEL, Description
from tuna_triton.devices import NVIDIA
from tuna_triton.exporters import (
    BlockFp8Exporter,
    SglangMoeExporter,
    VllmMoeExporter,
    WinnersExporter,
)
from tuna_triton.tiles import AXES, TARGETS
from tuna_triton.triton_kernel import TritonKernelConfig

_SHORT = dict(zip(AXES, ("m", "n", "k", "group ", "warps ", "stages "), strict=True))


def readable(params: str) -> str:
    """Return the tile in a line such as `m64 n128 k128 group 16 warps 4 stages 3`."""
    try:
        tile = dict(json.loads(params))
    except (ValueError, TypeError):
        return params
    return " ".join(f"{_SHORT.get(name, name + ' ')}{value}" for name, value in tile.items())


class TritonLibrary(SearchingLibrary, CrossCompiling):
    """Compiles kernels for NVIDIA's and AMD's GPUs on machines that have none."""

    name = "triton"
    kinds = ("gemm", "moe", TritonKernelConfig.kind)
    device_kind = NVIDIA
    conditions: Sequence[Condition] = ()
    in_rounds = frozenset({*DESCRIPTIONS, USER_KERNEL})
    exporters = (VllmMoeExporter(), SglangMoeExporter(), BlockFp8Exporter(), WinnersExporter())
    builder = "tuna_triton.builder:TritonBuilder"
    loader = "tuna_triton.driver:Cuda"
    measuring = "tuna_triton.cuda_measuring"
    device_code_only = True
    runs_bodies = True
    #: NVIDIA's driver maps private memory for what it shares with the device
    memory_bytes: ClassVar[int] = 64 << 30
    suffix: ClassVar[str] = ".tkb"
    #: not after rounds: opening the device takes a second, and its times are steadier
    finals = Finals(baselines=True)
    params = ParamsText(readable)
    #: Repeats on a device are steadier, and a fresh process, which opens the device anew, takes a
    #: second: there is one for each layer's finals.
    budgets: ClassVar[Budgets] = Budgets(
        candidate_s=0.05,
        finalist_s=0.1,
        finalist_processes=1,
        rival_s=0.2,
        rival_processes=1,
        first_again_s=0.02,
    )

    def environment(self) -> Environment:
        """That of the first NVIDIA device that this process may use."""
        triton_version()
        device = self._device
        if device is None or device.arch not in TARGETS:
            here = f"The GPU here is {device.arch}" if device else "No NVIDIA GPU was found here"
            known = ", ".join(arch for arch in TARGETS if arch.startswith("sm_"))
            raise LibraryMissing(
                f"{here}: Tuna measures Triton kernels on {known}.",
                hint="compile here for one that is elsewhere: `tuna init-session triton -l first"
                " --arch sm_90 --num-cu 132 --device-name 'NVIDIA H100 80GB HBM3'`, then `tuna"
                " import` and so on, as docs/gpu.md says",
            )
        return self._environment(device.arch, device.units, device.name)

    @functools.cached_property
    def _device(self) -> Device | None:
        found = (one for one in discover() if one.kind == self.device_kind and one.arch)
        return next(found, None)

    def environment_by_hand(self, facts: Mapping[str, str]) -> Environment:
        """Return the environment with this arch, num_cu (multiprocessors or compute units) and
        device_name."""
        check_facts(self, facts, "arch", "num_cu", "device_name")
        arch, units = facts.get("arch", ""), facts.get("num_cu", "")
        if arch not in TARGETS:
            raise BadInput(
                f"Unknown architecture {arch!r} for Triton kernels.",
                hint=f"--arch is one of {', '.join(TARGETS)}",
            )
        if not re.fullmatch("[1-9][0-9]{0,3}", units):
            raise BadInput(
                f"{units!r} is not a number of compute units from 1 to 9999.",
                hint="an H100 SXM: --num-cu 132; an MI300X: --num-cu 304",
            )
        return self._environment(arch, int(units), facts.get("device_name", ""))

    def _environment(self, arch: str, units: int, device: str) -> Environment:
        return Environment(
            library=self.name,
            library_version=triton_version(),
            arch=arch,
            num_cu=units,
            toolchain=self.toolchain(),
            device=device,
            target=arch,
            flags=kernel_digests(),
        )

    def toolchain(self) -> str:
        """Any machine with this Triton and these kernels builds the same code."""
        text = json.dumps(sorted(kernel_digests().items()))
        return f"triton-{triton_version()}-kernels-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def solvers(self) -> Sequence[Solver]:
        """Return each kernel twice: tuned, and with its consumer's default as a baseline."""
        kernels = [(one.name, one.family.kind, "GEMM") for one in DESCRIPTIONS.values()]
        kernels.append((USER_KERNEL, TritonKernelConfig.kind, "Direct"))
        return [
            solver
            for name, kind, algorithm in kernels
            for solver in (
                Solver(name, (kind,), algorithm),
                Solver(name + DEFAULT, (kind,), BASELINE, tunable=False),
            )
        ]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        """Return the kernels of consumers that the session's environment has, else Tuna's own."""
        target = TARGETS[environment.target]
        there = [one for one in DESCRIPTIONS.values() if one.name in environment.flags]
        consumed = {one.family.name for one in there if one.package}
        kernels = [one for one in there if one.package or one.family.name not in consumed]
        for config in configs:
            fit = [one.name for one in kernels if one.family.fits(config, target, one.package)]
            fit += [USER_KERNEL] if isinstance(config, TritonKernelConfig) else []
            yield config, [name for one in fit for name in (one, one + DEFAULT)]


def triton_version() -> str:
    """Return the version of the installed Triton, which is not imported; raises LibraryMissing."""
    try:
        return version("triton")
    except PackageNotFoundError:
        raise LibraryMissing("Triton is not installed.", hint=install_extra("triton")) from None


@functools.cache  # packages do not change while a worker lives
def kernel_digests() -> Mapping[str, str]:
    """Return the version of each kernel that is installed here, by its solver.

    A consumer whose file has changed beyond recognition is left out: its solver applies to nothing.
    """
    found = {name: _digest(one) for name, one in DESCRIPTIONS.items()}
    return {name: digest for name, digest in found.items() if digest}


def _digest(description: Description) -> str:
    try:
        found = description.kernel()
        return found.digest[:16] if found is not None else ""
    except BadInput as error:
        import structlog

        structlog.get_logger(__name__).warning(
            "kernel not usable", solver=description.name, fault=str(error)
        )
        return ""

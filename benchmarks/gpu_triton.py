"""A device whose kernels Triton's own JIT compiles and launches, as a consumer's program would."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # or the code would hold paths

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

from tuna.configs import Config
from tuna_triton import builder
from tuna_triton.artifact import Artifact, Launch
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.driver import Cuda
from tuna_triton.kernel_file import KernelFile
from tuna_triton.tiles import TARGETS, Element, KernelCall, Plan, tile_of

_DTYPES = {
    **{"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "fp8e4nv": tl.float8e4nv},
    **{"i32": tl.int32, "i8": tl.int8},
}


@dataclass
class _Tensor:
    """What Triton asks of a torch.Tensor."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        """The address on the device."""
        return self.address

    @staticmethod
    def is_contiguous() -> bool:
        """Always."""
        return True


class _Driver(CudaDriver):  # type: ignore[misc]
    """Triton's driver for NVIDIA without torch, which is used for the device and the stream
    alone."""

    def __init__(self, cuda: Cuda) -> None:
        arch = int(cuda.facts.arch.removeprefix("sm_"))
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_device_capability = lambda *_: divmod(arch, 10)
        self.get_current_device = lambda: 0
        self.set_current_device = lambda _: None
        self.get_current_stream = lambda _: cuda.stream
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        """The device's architecture."""
        return self.target


class JitCuda(Cuda):
    """Launches a candidate's kernels by Triton's JIT, wherever Tuna would launch its own code."""

    def __init__(self, solver: str, config: Config, params: str = "") -> None:
        """Of the tile that is chosen by `choose`, or `params`."""
        super().__init__()
        triton.runtime.driver.set_active(_Driver(self))
        self._description, self._config = DESCRIPTIONS[solver], config
        kernel = self._description.kernel()
        assert kernel is not None
        self._kernel, self._function = kernel, builder._function(kernel)
        self._codes: dict[tuple[str, int], bytes] = {}
        self._plans: dict[str, Plan] = {}
        self.params = params

    @property
    def kernel_file(self) -> KernelFile:
        """The file that has the kernel."""
        return self._kernel

    @property
    def function(self) -> Any:
        """The kernel as a function of Triton's."""
        return self._function

    @property
    def codes(self) -> list[bytes]:
        """What Triton compiled, in the order of the launches."""
        return [self._codes[key] for key in sorted(self._codes)]

    def plan(self, params: str) -> Plan:
        """The launches of a tile."""
        if params not in self._plans:
            target, package = TARGETS[self.facts.arch], self._description.package
            self._plans[params] = self._description.family.plan(
                self._config, tile_of(params), target, package
            )
        return self._plans[params]

    def artifact(self, params: str) -> Artifact:
        """A candidate without code, which names its tile instead."""
        plan = self.plan(params)
        launches = tuple(
            Launch(number, params, call.grid, 1, 32, 0, 0, 1, 0, 1, ())
            for number, call in enumerate(plan.calls)
        )
        codes = tuple(b"-" for _ in launches)
        return Artifact(self.facts.arch, "0", "0" * 64, plan.buffers, launches, codes)

    def load(self, binary: bytes) -> Any:
        """Nothing is loaded before the first launch."""
        return None

    def unload(self, module: Any) -> None:
        """Triton keeps what it loaded."""

    def kernel(self, module: Any, launch: Launch) -> Any:
        """Of a candidate without code, its tile."""
        return self.params or launch.symbol

    def prepared(
        self, kernel: Any, launch: Launch, addresses: Mapping[str, int]
    ) -> Callable[[], None]:
        """A function that calls the kernel as its consumer does."""
        plan = self.plan(kernel)
        call, elements = plan.calls[launch.binary], {one.name: one.element for one in plan.buffers}
        values: dict[str, Any] = {}
        for name in self._kernel.arguments:
            value: Any = builder.argument(self._kernel, call, name)
            if isinstance(value, Element):
                value = _DTYPES[value.name]
            elif isinstance(value, str):
                value = _Tensor(addresses[value], _DTYPES[elements[value]])
            values[name] = value
        options = {name: call.arguments[name] for name in ("num_warps", "num_stages")}

        def run() -> None:
            made = self.launch(plan, call, {**values, **options})
            self._codes[kernel, launch.binary] = made.asm["cubin"]

        return run

    def launch(self, plan: Plan, call: KernelCall, values: Mapping[str, Any]) -> Any:
        """Launch a kernel, which is compiled if it is new, and return it."""
        return self._function[call.grid](**values)


def timer(cuda: Cuda) -> Callable[[Callable[[], object]], float]:
    """Milliseconds of work in the stream, by torch's events where torch is installed."""
    try:
        import torch
    except ImportError:
        return cuda.time_ms
    stream = torch.cuda.ExternalStream(cuda.stream)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_ms(work: Callable[[], object]) -> float:
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end))

    return time_ms

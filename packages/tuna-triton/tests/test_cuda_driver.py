"""What reaches NVIDIA's driver, as its stand-in records it, and what its errors become."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_double
import numpy as np
import pytest
from cuda_double.beside_triton import flat
from cuda_double.stand_in import install
from shared_data import needed_program

from tuna.libraries.kernels import DeviceLost, DeviceUnusable
from tuna_triton.artifact import (
    GLOBAL_SCRATCH,
    PARAM_BYTES,
    PROFILE_SCRATCH,
    Launch,
    Param,
)
from tuna_triton.driver import Cuda, CudaError, DeviceMemory, scratch

PARAMS = (
    Param("a_ptr", "ptr", "a"),
    Param("M", "i32", value=-5),
    Param("scale", "fp32", value=0.1),
    Param("EM", "i64", value=1 << 40),
    Param("big", "u64", value=2**64 - 2),
    Param("wide", "fp64", value=-2.5),
    Param("bits", "u32", value=2**32 - 1),
    *(Param("is", "i1", value=1), Param("byte", "i8", value=-3), Param("half", "u16", value=65535)),
    Param("b_ptr", "ptr", "b"),
    *(Param(name, "ptr", name) for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH)),
)
LAUNCH = Launch(0, "gemm", (3, 2, 1), 8, 32, 100_000, 64, 1024, 0, 1, PARAMS)


class Recorded:
    """The device, and the calls that reached it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self.cuda = Cuda(str(folder / "libcuda.so.1"))

    def lines(self, word: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if line.startswith(word)]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setenv("FAKE_CUDA_LOG", str(tmp_path / "log"))
    return Recorded(install(tmp_path))


def run(device: Recorded, launch: Launch = LAUNCH, /, **words: object) -> dict[str, int]:
    """Launch once and wait; returns the addresses of the kernel's buffers."""
    with DeviceMemory(device.cuda) as memory:
        at = {"a": memory.allocate(64), "b": memory.allocate(64), **scratch(launch, memory)}
        module = device.cuda.load(cuda_double.image(launch.params, **words))
        device.cuda.prepared(device.cuda.kernel(module, launch), launch, at)()
        device.cuda.synchronize()
    return at


def test_arguments_grid_and_shared_memory_reach_the_driver(recorded: Recorded) -> None:
    at = run(recorded)
    scale = int(np.float32(0.1).view(np.uint32))
    wide = int(np.float64(-2.5).view(np.uint64))
    arguments = [
        at["a"], 2**32 - 5, scale, 1 << 40, 2**64 - 2, wide, 2**32 - 1, 1, 253, 65535, at["b"],
        at[GLOBAL_SCRATCH], 0,
    ]  # fmt: skip
    assert recorded.lines("launch") == [
        "launch gemm grid=3,2,1 block=256,1,1 shared=100000 args "
        + " ".join(f"{one:x}" for one in arguments)
    ]
    # as much as a block can have, less the 16 bytes that the kernel has statically
    run(recorded, static_shared=16)
    assert recorded.lines("cuFuncSet")[2:] == [
        "cuFuncSetCacheConfig gemm 1",
        "cuFuncSetAttribute gemm 8 232432",
    ]


def test_a_kernel_of_little_shared_memory_asks_for_no_more(recorded: Recorded) -> None:
    run(recorded, replace(LAUNCH, shared_bytes=48 << 10))
    assert recorded.lines("cuFuncSet") == []


def test_scratch_is_for_all_programs_and_aligned(recorded: Recorded) -> None:
    at = run(recorded)
    assert (at[GLOBAL_SCRATCH] % 1024, at[PROFILE_SCRATCH]) == (0, 0)
    assert recorded.lines("cuMemAlloc")[-1] == f"cuMemAlloc {6 * 64 + 1024 - 256}"


def test_a_graph_is_timed_by_events(recorded: Recorded) -> None:
    cuda = recorded.cuda
    with DeviceMemory(cuda) as memory:
        at = {"a": memory.allocate(64), "b": memory.allocate(64), **scratch(LAUNCH, memory)}
        kernel = cuda.kernel(cuda.load(cuda_double.image(PARAMS, time_us=7)), LAUNCH)
        graph = cuda.graph(lambda: [cuda.prepared(kernel, LAUNCH, at)() for _ in range(5)])
        assert cuda.time_ms(lambda: cuda.launch_graph(graph)) == pytest.approx(0.035, rel=1e-5)
        assert cuda.time_ms(lambda: cuda.prepared(kernel, LAUNCH, at)()) == pytest.approx(0.007)
        cuda.destroy(graph)
    assert [line.split()[-15] for line in recorded.lines("launch")] == ["captured"] * 5 + [
        "shared=100000"
    ]


def test_what_fails_while_a_graph_is_recorded_leaves_the_stream_usable(recorded: Recorded) -> None:
    def fail() -> None:
        raise ValueError("no graph")

    with pytest.raises(ValueError, match="no graph"):
        recorded.cuda.graph(fail)
    run(recorded)


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ({"error": 700}, DeviceUnusable, "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS: an ill"),
        ({"error": 719}, DeviceUnusable, "CUDA_ERROR_LAUNCH_FAILED"),
        ({"error": 999}, DeviceUnusable, r"unknown error \(999\)"),
        ({"error": 214}, DeviceLost, "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ({"launch": 701}, CudaError, "cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        ({"name": "other"}, CudaError, "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_an_error_says_what_it_leaves_usable(
    recorded: Recorded, words: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as raised:
        run(recorded, **words)
    assert type(raised.value) is kind
    if kind is CudaError:
        run(recorded)
        return
    with pytest.raises(kind):
        run(recorded)


def test_memory_is_freed_together(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", "1000")
    for _ in range(3):
        with DeviceMemory(recorded.cuda) as memory:
            memory.allocate(600)
            with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
                memory.allocate(600)


def test_no_driver_and_no_device_are_a_lost_device(tmp_path: Path) -> None:
    with pytest.raises(DeviceLost, match=r"the NVIDIA driver cannot be used: .*libcuda"):
        Cuda(str(tmp_path / "libcuda.so.1"))
    install(tmp_path)
    (tmp_path / "lost").touch()
    with pytest.raises(DeviceLost, match="cannot be opened: cuInit: CUDA_ERROR_NO_DEVICE"):
        Cuda(str(tmp_path / "libcuda.so.1"))


def signatures() -> Sequence[dict[str, Any]]:
    """Twenty signatures as Triton's JIT has them after it specialised the arguments; a tuple is one
    argument that the kernel takes apart."""
    ptr, i32, i64, const = "*bf16", "i32", "i64", "constexpr"
    gemm = [ptr, "*bf16", "*fp32", i32, i32, i32, i32, const, i32, const, i32, const, const]
    blocks = ["*fp8e4nv", "*fp8e4nv", ptr, "*fp32", "*fp32", i32, i32, i32, const, const]
    moe = [ptr, ptr, ptr, "*fp32", "*fp32", "*fp32", "*i32", "*i32", "*i32", *[i32] * 4]
    kinds: list[list[Any]] = [
        gemm,
        [*gemm[:3], const, *gemm[4:]],
        [*gemm[:3], i32, i64, *gemm[5:]],
        [*blocks, *[i32] * 6, *[const] * 6],
        [*blocks, i32, const, i32, const, i32, const, i32, const, i64, const, *[const] * 4],
        [*moe, *[i32] * 12, *[const] * 8],
        [*moe[:3], const, const, *moe[5:], i64, const, i64, const, *[i32] * 5, *[const] * 9],
        [*moe[:4], "*fp32", "*i64", *moe[6:], *[const] * 12],
        [ptr],
        [ptr, "i1", "i8", "i16", "u8", "u16"],
        [ptr, (i32, ptr, const), "fp32", ((i64, "fp64"), "i1")],
        [ptr, "fp64", i32],
        ["fp32", ptr, i64, "fp32"],
        [ptr, "u32", "u64"],
        [const, ptr, const, i32],
        [ptr, ptr, ptr, i32, const],
        [ptr, ptr, i64, i64, i64, "fp32", const],
        [i32, i64, i32, i64, ptr],
        ["*i8", "*fp16", "*fp16", "*fp32", i32, i32],
        [*[ptr] * 20, *[i32] * 20],
    ]
    assert len(kinds) == 20
    return [{f"x{at}": kind for at, kind in enumerate(one)} for one in kinds]


def params_of(signature: dict[str, Any]) -> tuple[Param, ...]:
    """What our launch has for a signature of Triton's: see `builder`."""
    params = [
        Param(f"x{at}", "ptr", buffer=f"x{at}")
        if kind[0] == "*"
        else Param(f"x{at}", kind, value=37)
        for at, kind in enumerate(flat(list(signature.values())))
        if kind != "constexpr"
    ]
    return (*params, *(Param(name, "ptr", name) for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH)))


@pytest.fixture(scope="module")
def triton_driver() -> Any:
    """The module of Triton that generates launchers."""
    made = pytest.importorskip("triton.backends.nvidia.driver", reason="needs the extra `triton`")
    if not hasattr(made, "make_launcher"):
        pytest.skip("Triton 3.7 and newer have one launcher for every signature, in driver.c")
    return made


C_BYTES = {
    **{"CUdeviceptr": 8, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8},
    **{"int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2},
}


@pytest.mark.parametrize("signature", signatures(), ids=lambda one: str(len(one)))
def test_arguments_are_those_of_tritons_own_launcher(
    triton_driver: Any, signature: dict[str, Any]
) -> None:
    text = triton_driver.make_launcher({}, signature, None)
    head = re.search(r"static void _launch\((.*?)\) \{", text)
    listed = re.search(r"void \*params\[\] = \{ (.*?) \};", text)
    assert head is not None
    assert listed is not None
    types = {name: kind for kind, name in (one.split(" ") for one in head[1].split(", "))}
    names = [one.removeprefix("&") for one in listed[1].split(", ")]
    ours = params_of(signature)
    assert names == [one.name.replace("x", "arg") for one in ours]
    assert [C_BYTES[types[one]] for one in names] == [PARAM_BYTES[one.type] for one in ours]


@pytest.mark.parametrize(
    "places", [(1, 9, 10), pytest.param(range(20), marks=pytest.mark.drill(only=True))]
)
def test_launches_are_those_of_tritons_own_launcher(
    triton_driver: Any, tmp_path: Path, places: Sequence[int]
) -> None:
    """Its C text, compiled and run beside ours on the stand-in."""
    install(tmp_path)
    include = Path(triton_driver.__file__).parent / "include"
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").exists():
        pytest.skip("needs Python.h")
    chosen = [signatures()[place] for place in places]
    compiler = needed_program("cc")
    for number, signature in enumerate(chosen):
        source = tmp_path / f"{number}.c"
        source.write_text(triton_driver.make_launcher({}, signature, None))
        flags = ["-shared", "-fPIC", "-w", f"-I{include}", f"-I{python}", f"-L{tmp_path}"]
        made = tmp_path / f"{number}.so"
        subprocess.run(
            [compiler, *flags, "-o", made, source, "-l:libcuda.so.1"], check=True, timeout=120
        )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "FAKE_CUDA_LOG": str(tmp_path / "log"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    facts = json.dumps([list(one.values()) for one in chosen])
    command = [sys.executable, "-m", "cuda_double.beside_triton", str(tmp_path), facts]
    subprocess.run(command, env=environment, check=True, timeout=120)
    lines = [
        line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")
    ]
    assert len(lines) == 2 * len(chosen)
    assert lines[::2] == lines[1::2]
    assert all("grid=5,4,3 block=256,1,1 shared=70000" in line for line in lines)

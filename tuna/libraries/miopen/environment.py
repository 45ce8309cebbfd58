"""Detects GPU, ROCm and MIOpen from rocminfo and ROCm's version files, or takes them from the
command line."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.base import Environment
from tuna.sandbox.box import Box
from tuna.sandbox.processes import run
from tuna.settings import get_settings

_ARCH = re.compile(r"gfx[0-9a-f]{3,4}")
_ROCMINFO_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by rocminfo."""

    arch: str  #: architecture, such as gfx90a
    num_cu: int  #: number of compute units as MIOpen counts them


def describe() -> Environment:
    """This machine's environment; raises LibraryMissing if it has no GPU or no ROCm."""
    found = visible_gpu()
    return _environment(found.arch, found.num_cu, rocm_version(), miopen_version())


def from_options(facts: Mapping[str, str]) -> Environment:
    """The environment given by options, for machines without the GPU; raises BadInput for invalid
    ones.

    `facts` are arch, num_cu, rocm_v and miopen_v; the last two default to this machine's.
    """
    if not facts.get("arch") or not facts.get("num_cu"):
        raise BadInput(
            "An environment by hand needs an architecture and a number of compute units.",
            hint="give --arch and --num-cu",
        )
    arch, digits = facts["arch"], facts["num_cu"]
    if not _ARCH.fullmatch(arch):
        raise BadInput(f"{arch!r} is not an architecture such as gfx90a or gfx1201.")
    if not re.fullmatch("[0-9]{1,4}", digits) or not 0 < int(digits) <= 4096:
        raise BadInput(f"{digits!r} is not a number of compute units.")
    return _environment(
        arch,
        int(digits),
        facts.get("rocm_v") or rocm_version(),
        facts.get("miopen_v") or miopen_version(),
    )


def toolchain() -> str:
    """The toolchain, which decides which compile jobs a worker can take: ROCm and MIOpen versions,
    without the GPU."""
    return _toolchain(rocm_version(), miopen_version())


def _toolchain(rocm_v: str, miopen_v: str) -> str:
    return f"rocm-{rocm_v}+miopen-{miopen_v}"


def _environment(arch: str, num_cu: int, rocm_v: str, miopen_v: str) -> Environment:
    return Environment(
        library="miopen",
        library_version=miopen_v,
        arch=arch,
        num_cu=num_cu,
        toolchain=_toolchain(rocm_v, miopen_v),
        target=f"{arch} {num_cu}",
    )


def target_of(text: str) -> tuple[str, int]:
    """Architecture and compute units of an `Environment.target`."""
    arch, _, num_cu = text.partition(" ")
    return arch, int(num_cu)


def rocm_version() -> str:
    """The version of the ROCm that is installed; raises LibraryMissing."""
    path = _rocm() / ".info" / "version"
    try:
        return path.read_text().strip()
    except OSError as error:
        raise LibraryMissing(
            f"ROCm's version file {path} cannot be read: {error.strerror}.", hint=_HINT
        ) from None


def miopen_version() -> str:
    """major.minor.patch.tweak of the MIOpen that is installed; raises LibraryMissing."""
    path = _rocm() / "include" / "miopen" / "version.h"
    try:
        text = path.read_text()
    except OSError as error:
        raise LibraryMissing(
            f"MIOpen's header {path} cannot be read: {error.strerror}.", hint=_HINT
        ) from None
    parts = []
    for name in ("MAJOR", "MINOR", "PATCH", "TWEAK"):
        found = re.search(rf"#define\s+MIOPEN_VERSION_{name}\s+(\S+)", text)
        if found is None:
            raise LibraryMissing(f"{path} does not define MIOPEN_VERSION_{name}.")
        parts.append(found[1])
    return ".".join(parts)


_HINT = (
    "install ROCm, set TUNA_ROCM_PATH to it, or give --arch, --num-cu, --rocm-version and"
    " --miopen-version by hand"
)


def _rocm() -> Path:
    return get_settings().rocm_path


def find_gpu() -> Gpu:
    """The GPU that HIP_VISIBLE_DEVICES names first, else the first; raises LibraryMissing when
    there is none."""
    program = _rocm() / "bin" / "rocminfo"
    if not program.exists():
        raise LibraryMissing(f"The GPU cannot be detected: {program} is not installed.", hint=_HINT)
    done = run([str(program)], timeout_s=_ROCMINFO_TIMEOUT_S, box=Box(gpus=True))
    if done.returncode:
        raise LibraryMissing(
            f"{program} failed: {done.output.strip().splitlines()[-1:] or done.returncode}."
        )
    gpus = parse_rocminfo(done.output)
    if not gpus:
        raise LibraryMissing(
            "rocminfo shows no GPU on this machine.",
            hint="give --arch and --num-cu by hand to prepare a session",
        )
    first = os.environ.get("HIP_VISIBLE_DEVICES", "0").split(",")[0]
    index = int(first) if first.isdigit() else 0
    if index >= len(gpus):
        raise LibraryMissing(f"HIP_VISIBLE_DEVICES names GPU {index}; rocminfo shows {len(gpus)}.")
    return gpus[index]


visible_gpu = functools.cache(find_gpu)


def parse_rocminfo(text: str) -> list[Gpu]:
    """The GPU agents in the order of their numbers.

    On gfx10, gfx11 and gfx12 devices MIOpen counts work-group processors, of two compute units each
    (`GetMaxHardwareComputeUnits` in its `src/include/miopen/handle.hpp`): the databases of a
    gfx1030 with 72 compute units have 36 in their names.
    """
    gpus = []
    for agent in re.split(r"(?m)^Agent \d+\s*$", text)[1:]:
        fields: dict[str, str] = {}
        for line in agent.splitlines():
            name, colon, value = line.partition(":")
            if colon and value.strip():
                fields.setdefault(name.strip(), value.strip())
        if fields.get("Device Type") != "GPU" or not _ARCH.fullmatch(fields.get("Name", "")):
            continue
        arch, num_cu = fields["Name"], int(fields["Compute Unit"])
        gpus.append(Gpu(arch, num_cu // 2 if arch.startswith("gfx1") else num_cu))
    return gpus

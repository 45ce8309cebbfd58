"""Limits of the processes that read, plan, link and run models, and what is said at a limit.

Memory is limited by RLIMIT_DATA (`tuna.sandbox.box.resources` says why), CPU time by RLIMIT_CPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import Field

from tuna.api import SettingsSection, get_section, get_settings
from tuna.common.control_groups import memory_bytes
from tuna.errors import BadInput
from tuna.sandbox.processes import ChildFault

#: Most MiB that half of a large machine's memory counts as.
_MAX_MIB = 32 << 10
#: Words of Python, C++, protobuf and NumPy where an allocation fails, in any exception.
_FAILED = r"MemoryError|bad_alloc|alloc(ation)? failed|Failed to serialize proto"
#: Words of a process that ended, SIGKILL being the kernel's.
_ENDED = re.compile(rf"{_FAILED}|out of memory|(unable to|cannot) allocate|SIGKILL", re.IGNORECASE)
#: Signals of a process that used what an allocation did not give it.
_CRASHES = re.compile("SIGSEGV|SIGABRT|SIGBUS|SIGILL|SIGTRAP")


class ModelSettings(SettingsSection):
    """Limits of a process that works on a model."""

    model_memory_mib: int = Field(
        0,
        ge=0,
        description=(
            "memory of the process that imports, plans and links models; 0:"
            " TUNA_SANDBOX_MEMORY_MIB, else half of this machine's, at most 32768"
        ),
    )
    model_cpu_s: int = Field(
        900,
        ge=1,
        le=1_000_000,
        description="CPU seconds of one of its steps, for each core that it uses",
    )


@dataclass(frozen=True)
class ModelLimits:
    """Memory of a process, and CPU seconds of one of its steps for each core that it uses."""

    memory_mib: int
    cpu_s: int
    forks: bool = True  #: The right answers may be computed in a fork, which has as much for itself
    memory_setting: str = "set TUNA_MODEL_MEMORY_MIB"
    cpu_setting: str = "set TUNA_MODEL_CPU_S"

    @classmethod
    def of_settings(cls) -> ModelLimits:
        """Return the limits of the settings; raises BadInput for an invalid one."""
        settings = get_section(ModelSettings)
        half_mib = min(memory_bytes() >> 21, _MAX_MIB)
        mib = settings.model_memory_mib or get_settings().sandbox_memory_mib or half_mib
        return cls(mib, settings.model_cpu_s)

    @property
    def resources(self) -> dict[str, int]:
        """Limits of a process by their names in module `resource`."""
        return {"RLIMIT_DATA": self.memory_mib << 20}

    def refusal(self, what: str, fault: ChildFault, cores: int) -> BadInput | None:
        """Return the error for a process that ended at a limit; None for another fault."""
        if "SIGXCPU" in str(fault):
            return BadInput(
                f"{what} took more than {self.cpu_s * cores} CPU seconds.",
                hint=f"{self.cpu_setting}, {self.cpu_s} now, to allow more for each of its cores",
            )
        # where it had half of it, a copy, or a buffer that doubles, was too much
        much = 2 * getattr(fault, "peak_bytes", 0) > self.memory_mib << 20
        crashed = much and _CRASHES.search(str(fault))
        if not crashed and not _ENDED.search(f"{fault}\n{fault.tail}"):
            return None
        return BadInput(
            f"{what} needs more memory than the {self.memory_mib} MiB that it may take, or than is"
            " free.",
            hint=f"{self.memory_setting} to allow more, or take a smaller batch",
        )


def raise_memory_error(error: BaseException | None) -> None:
    """Raise MemoryError if an exception, or one that it came from, says that memory ran out.

    Whatever catches all exceptions of an operator calls this first: a refusal that blames the
    operator would be wrong.
    """
    while error is not None:
        if isinstance(error, MemoryError) or re.search(_FAILED, str(error)):
            raise MemoryError from error
        error = error.__cause__ or error.__context__

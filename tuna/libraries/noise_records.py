"""Records of `tuna doctor --noise`, kept in TUNA_HOME, and whether builds must stop while this
machine measures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from tuna.common.cpu import cpu_model
from tuna.common.files import atomic_file
from tuna.errors import LibraryMissing
from tuna.plugins import Plugins
from tuna.sandbox.cores import available_cpus, eval_cpus
from tuna.settings import Settings

#: Change of a kernel's time, as a share, above which builds disturb
MAX_NOISE = 0.03
_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class NoiseRecord:
    """One finding: what builds on the other cores do to fixed kernels."""

    at: str  #: UTC time in ISO 8601
    machine: Mapping[str, str]  #: facts that identify the machine
    library: str  #: library whose builds ran
    builds: int  #: number of builds that ran concurrently
    pairs: int
    #: median over the pairs of time with builds / time without - 1, by kernel and clock (`cpu`,
    #: `wall`)
    differences: Mapping[str, Mapping[str, float]]

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return max(
            (value for clocks in self.differences.values() for value in clocks.values()),
            default=0.0,
        )

    @property
    def noisy(self) -> bool:
        """Whether builds disturb measurements here."""
        return self.worst > MAX_NOISE


@dataclass(frozen=True)
class Quiet:
    """Whether builds must stop while this machine measures, and why."""

    needed: bool
    reason: str


def machine_identity(settings: Settings) -> dict[str, str]:
    """Return the facts for which a record holds: another host, CPU, number of cores or choice of
    measuring cores needs a record of its own."""
    machine_id = ""
    with contextlib.suppress(OSError):
        machine_id = _MACHINE_ID.read_text().strip()
    model = cpu_model()
    return {
        "host": socket.gethostname(),
        # a secret of the machine, by machine-id(5)
        "machine_id": hashlib.sha256(f"tuna {machine_id}".encode()).hexdigest()[:16],
        "cpu": f"{model.name} {model.digest}",
        "cores": str(os.cpu_count()),
        "usable": ",".join(map(str, available_cpus())),
        "measuring": ",".join(map(str, eval_cpus(settings))),
    }


#: What measures noise: a function as `measure` here.
_WAYS: Plugins[Any] = Plugins("tuna.noise", "measurement of noise", FunctionType)


def measure(settings: Settings, pairs: int, on_pair: Callable[[int], None]) -> NoiseRecord:
    """Measure by the function that a package brings; raises LibraryMissing without one."""
    for found in _WAYS.all().values():
        record: NoiseRecord = found(settings, pairs, on_pair)
        return record
    raise LibraryMissing(
        "Measuring noise needs the package tuna-noise.", hint="pip install tuna-noise"
    )


def store(record: NoiseRecord, settings: Settings) -> None:
    """Keep the finding, instead of an earlier one for the same machine."""
    with atomic_file(_path(settings, record.machine)) as temporary:
        temporary.write_text(json.dumps({**asdict(record), "noisy": record.noisy}, indent=1))


def last(settings: Settings) -> NoiseRecord | None:
    """The last finding for this machine as it is; None if it is missing or damaged."""
    machine = machine_identity(settings)
    try:
        facts = json.loads(_path(settings, machine).read_text())
        facts.pop("noisy")
        record = NoiseRecord(**facts)
        return record if record.machine == machine and record.worst >= -1 else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def quiet_needed(settings: Settings, *, cores_only: bool = True) -> Quiet:
    """Decide by TUNA_QUIET; `cores_only`: whether this machine's cores are measured, and no other
    device."""
    if settings.quiet != "auto":
        return Quiet(settings.quiet == "yes", f"TUNA_QUIET={settings.quiet}")
    if not cores_only:
        return Quiet(False, "TUNA_QUIET=auto is about measurements on cores")
    found = last(settings)
    if found is None:
        return Quiet(
            False, "TUNA_QUIET=auto, and `tuna doctor --noise` was not run on this machine"
        )
    words = "more than" if found.noisy else "at most"
    reason = (
        f"TUNA_QUIET=auto, builds changed times by {found.worst:.1%},"
        f" {words} {MAX_NOISE:.0%} ({found.at[:10]})"
    )
    return Quiet(found.noisy, reason)


def _path(settings: Settings, machine: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return settings.home / "noise" / f"{digest}.json"

"""Commands that run before and after a worker: a power cycle, a health probe."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping

from tuna.errors import ServiceError
from tuna.settings import Settings

#: Long enough to reset or reboot a device.
LIMIT_S = 600.0
_TAIL_CHARS = 2000
#: How often at most a lost board is reset: one that boots must not be stopped in it.
_RESET_EVERY_S = 60.0


def run_hook(setting: str, command: str, env: Mapping[str, str], limit_s: float = LIMIT_S) -> None:
    """Run the `command` that `setting` holds, if any, with `env` over our own; raises ServiceError
    with its output."""
    if not command:
        return
    try:
        process = subprocess.Popen(
            shlex.split(command),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for this process: a power cycle must not be interrupted
            start_new_session=True,
        )
    except OSError as error:
        raise ServiceError(
            f"{setting} cannot be started: {error.strerror}: {error.filename}"
        ) from None
    with process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            # and the processes that a shell among them started
            os.killpg(process.pid, signal.SIGKILL)
            raise ServiceError(
                f"{setting} did not end within {limit_s:g} s. {_tail(error.output)}"
            ) from None
    if process.returncode:
        raise ServiceError(f"{setting} failed with exit code {process.returncode}. {_tail(output)}")


def _tail(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace").strip()[-_TAIL_CHARS:]


class DeviceRepair:
    """Runs, for a device in quarantine, the hooks that may bring it back."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reset_at = -math.inf

    def __call__(self) -> None:
        """The hook that follows a worker's end may repair its device, too."""
        run_hook("TUNA_AFTER_WORKER", self._settings.after_worker, {})
        if time.monotonic() - self._reset_at >= _RESET_EVERY_S:
            self._reset_at = time.monotonic()
            run_hook("TUNA_TVM_RESET", self._settings.tvm_reset, {})

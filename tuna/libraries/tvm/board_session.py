"""Facts that a board behind TVM's RPC reports, and its errors."""

from __future__ import annotations

from typing import Any

#: Function that the server of an emulated board has, which returns the emulator's name
EMULATOR = "tuna.emulator"


def facts(session: Any) -> dict[str, Any]:
    """Return the facts that decide whether two boards are of one kind, as their runtime reports
    them."""

    def ask(name: str, otherwise: Any) -> Any:
        try:
            function = session.get_function(name)
        except AttributeError:  # a runtime without a compiler does not have it
            return otherwise
        return function()

    return {
        "cpu": str(ask("target.llvm_get_system_cpu", "")),
        "triple": str(ask("target.llvm_get_system_triple", "")),
        "threads": int(ask("runtime.NumThreads", 1)),
        "llvm": int(ask("target.llvm_version_major", 0)),
        "emulator": str(ask(EMULATOR, "")),
        "model": _model(session),
    }


def _model(session: Any) -> str:
    """The name that a device tree has for the board, such as Raspberry Pi 4 Model B; empty where
    there is none."""
    try:
        text = bytes(session.download("/sys/firmware/devicetree/base/model"))
    except Exception:  # an RPCError of the board's: the file is missing
        return ""
    return text.rstrip(b"\0").decode(errors="replace")[:100]


def last_line(error: BaseException) -> str:
    """Return the message of TVM's error, without the trace that stands before it, and without a
    full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".: ")

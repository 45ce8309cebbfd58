"""The names of the queues: which machines may do which work."""

from __future__ import annotations


def queue_name(step_is_on_device: bool, toolchain: str, environment: str) -> str:
    """`compile.<toolchain>`: any machine that has it. `eval.<environment>`: only the very device
    class."""
    return f"eval.{environment}" if step_is_on_device else f"compile.{toolchain}"

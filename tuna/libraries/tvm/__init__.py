"""Apache TVM, tuned on this machine's CPU with MetaSchedule's space."""

from tuna.libraries.tvm.library import TvmLibrary

__all__ = ["TvmLibrary"]

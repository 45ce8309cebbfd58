"""Apache TVM on this machine's CPU: kernels of our own, and MetaSchedule's space for the rest."""

from tuna.libraries.tvm.library import TvmLibrary

__all__ = ["TvmLibrary"]

"""Apache TVM on this machine's CPU, or on boards: kernels of our own, and MetaSchedule's space for
the rest."""

from tuna.libraries.boards import board_settings, installed_boards
from tuna.libraries.tvm.library import TvmLibrary

__all__ = ["TvmLibrary", "tvm_library"]


def tvm_library() -> TvmLibrary:
    """TVM as this process is to use it: on boards where TUNA_TVM_TRACKER names a tracker."""
    return TvmLibrary(installed_boards() if board_settings().tvm_tracker else None)

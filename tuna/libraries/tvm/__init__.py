"""Apache TVM on this machine's CPU, or on boards behind TVM's RPC: kernels of our own, and
MetaSchedule's space for the rest."""

from tuna.libraries.tvm.library import BoardTvmLibrary, TvmLibrary
from tuna.settings import get_settings

__all__ = ["BoardTvmLibrary", "TvmLibrary", "tvm_library"]


def tvm_library() -> TvmLibrary:
    """TVM as this process is to use it: on boards where TUNA_TVM_TRACKER names a tracker."""
    return BoardTvmLibrary() if get_settings().tvm_tracker else TvmLibrary()

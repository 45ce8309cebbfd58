"""oneDNN, Intel's library of CPU kernels: its implementations are solvers, measured as they are."""

from tuna_onednn.library import OneDnnLibrary

__all__ = ["OneDnnLibrary"]

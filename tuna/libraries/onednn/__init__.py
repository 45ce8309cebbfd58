"""oneDNN, Intel's library of CPU kernels: its implementations are solvers, measured as they are."""

from tuna.libraries.onednn.library import OneDnnLibrary

__all__ = ["OneDnnLibrary"]

"""Models from Python: what `tuna model` and `tuna benchmark-model` do, as functions that return
data and print nothing.

    from tuna_models import api

    api.import_model("net", Path("net.onnx"))
    api.tune_model("net", minutes=10)
    api.build_model("net", Path("net.so")).time_ms

Importing this takes no time: a name's module is imported when the name is used first. The names are
those that `__init__.pyi`, which type checkers read, imports.
"""

from __future__ import annotations

from tuna.api.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

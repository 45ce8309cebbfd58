"""Tuna from Python: what the commands do, as functions that return data and print nothing.

    from tuna import api

    session = api.init_session("tvm", "from a notebook")
    api.import_configs(Path("layers.txt"), "mine")
    api.update_solvers("tvm")
    api.update_applicability(session.id, "mine")
    api.load_jobs(session.id, tag="mine", reason="tuning", options={"candidates": 16})
    api.run(session.id)
    api.report(session.id).layers[0].best

They use the settings of the process (`TUNA_*`), as the commands do, and raise
`tuna.errors.TunaError`. Importing this takes no time: a name's module is imported when the name is
used first. The names are those that `__init__.pyi`, which type checkers read, imports.
"""

from __future__ import annotations

from tuna.api.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

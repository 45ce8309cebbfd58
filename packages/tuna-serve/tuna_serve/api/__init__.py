"""The cache from Python: what `tuna cache` does, as functions that return data and print nothing.

    from tuna_serve import api

    api.list_spaces()
    api.pack_cache("team", Path("pack"))

Importing this takes no time: a name's module is imported when the name is used first. The names are
those that `__init__.pyi`, which type checkers read, imports.
"""

from __future__ import annotations

from tuna.api.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)

"""Starts Python modules as processes that find what this process finds.

`python -m MODULE` puts the working directory before everything else: a folder `tuna` there (which
the README's `git clone ... tuna` makes) or a file `redis.py` would be imported instead of the
package.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: Program that runs the module that the next argument names, with the working directory not among
#: the places of modules. `-P` does that only from Python 3.11 on.
_RUN = """\
import sys
sys.path[:] = [place for place in sys.path if place]
import runpy
{before}
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


#: Program like `_RUN`, with `tuna` but no other site packages, which starts twice as fast
_RUN_BARE = """\
import sys, types
sys.modules["tuna"] = types.ModuleType("tuna")
sys.modules["tuna"].__path__ = [{package!r}]
from {module} import main
main(sys.argv[1:])
"""
_PACKAGE = str(Path(__file__).resolve().parents[1])


def bare_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs the `main` of a module of Tuna with the standard library alone."""
    code = _RUN_BARE.format(package=_PACKAGE, module=module)
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


def module_command(module: str, *arguments: str, before: str = "") -> list[str]:
    """Command line that runs the statement `before`, then a module as `python -m` does."""
    return [sys.executable, "-c", _RUN.format(before=before), module, *arguments]

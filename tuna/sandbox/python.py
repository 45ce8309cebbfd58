"""Starts Python modules as processes that find what this process finds.

`python -m MODULE` puts the working directory before everything else: a folder `tuna` there (which
the README's `git clone ... tuna` makes) or a file `redis.py` would be imported instead of the
package.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: Runs the module that the next argument names, with the working directory not among the places of
#: modules. `-P` does that only from Python 3.11 on.
_RUN = """\
import sys
sys.path[:] = [place for place in sys.path if place]
import runpy
{before}
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


#: The same without looking for packages, which starts twice as fast; the package `tuna` is there,
#: what it imports is not.
_RUN_BARE = """\
import sys, types
sys.modules["tuna"] = types.ModuleType("tuna")
sys.modules["tuna"].__path__ = [{package!r}]
from {module} import main
main(sys.argv[1:])
"""
_PACKAGE = str(Path(__file__).resolve().parents[1])


def bare_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of Tuna's which imports the standard library alone and
    has a `main`."""
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _RUN_BARE.format(package=_PACKAGE, module=module),
        *arguments,
    ]


def module_command(module: str, *arguments: str, before: str = "") -> list[str]:
    """The command line that runs a module as `python -m` does, and the statement `before` before
    that."""
    return [sys.executable, "-c", _RUN.format(before=before), module, *arguments]

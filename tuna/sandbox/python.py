"""Starts Python modules as processes that find what this process finds.

`python -m MODULE` puts the working directory before everything else: a folder `tuna` there (which the README's `git clone ...
tuna` makes) or a file `redis.py` would be imported instead of the package.
"""

from __future__ import annotations

import sys

#: Runs the module that the next argument names, with the working directory not among the places of modules. `-P` does that only
#: from Python 3.11 on.
_RUN = """\
import sys
sys.path[:] = [place for place in sys.path if place]
import runpy
{before}runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def module_command(module: str, *arguments: str, after: str = "") -> list[str]:
    """The command line that runs a module as `python -m` does; `after` is imported before it."""
    before = f"import {after}\n" if after else ""
    return [sys.executable, "-c", _RUN.format(before=before), module, *arguments]

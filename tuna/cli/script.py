"""Starts a program of the source tree, which a Python may run that lacks the packages that Tuna
needs."""

from __future__ import annotations

import importlib
import sys


def run(module: str, function: str) -> None:
    """Call a function of a module; where a package is missing, say which Python has it."""
    try:
        main = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0].replace("_", "-")
        if package == "tuna":
            raise
        raise SystemExit(
            f"Error: the package {package} is not installed for {sys.executable}.\n  run this"
            " with the Python that Tuna is installed in, such as .venv/bin/python;"
            " scripts/quickstart installs it there"
        ) from None
    main()

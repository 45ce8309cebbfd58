"""The settings file: where it lies, and that only this user and root can have written it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from tuna.common.files import check_own
from tuna.errors import BadInput

#: Maximum of bytes of a settings file
_MAX_BYTES = 1 << 20
_NAME = "tuna.toml"


def settings_file() -> Path | None:
    """Return the file that TUNA_CONFIG names, else tuna.toml in the user's configuration folder.

    None if there is none. Raises BadInput for a file that is missing, too large, or that another
    user can write to: it names programs to run.
    """
    named = os.environ.get("TUNA_CONFIG")
    path = Path(named) if named else _usual_file()
    if not path.exists():
        if named:
            raise BadInput(f"TUNA_CONFIG names {path}, which is not there.")
        return None
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise BadInput(f"{path} is not a file, or has more than {_MAX_BYTES} bytes.")
    check_own(path)
    return path


def ignored_file() -> str | None:
    """Return a sentence on a tuna.toml in the current folder, which is not read; None without."""
    if os.environ.get("TUNA_CONFIG") or not os.path.lexists(_NAME):
        return None
    usual = _usual_file()
    if usual.exists() and os.path.realpath(usual) == os.path.realpath(_NAME):
        return None
    return (
        f"{_NAME} in the current folder is not read; if you trust it, set TUNA_CONFIG=./{_NAME},"
        f" or move it to {usual}"
    )


def settings_paths() -> list[Path]:
    """Return where a settings file may lie, so that boxed programs do not read it."""
    named = os.environ.get("TUNA_CONFIG")
    return [*([Path(named)] if named else []), Path(_NAME), _usual_file()]


def _usual_file() -> Path:
    try:
        path = platformdirs.user_config_path("tuna") / _NAME
    except RuntimeError:  # HOME is unknown; older versions of platformdirs return a relative path
        return Path("/nonexistent", _NAME)
    return path if path.is_absolute() else Path("/nonexistent", _NAME)

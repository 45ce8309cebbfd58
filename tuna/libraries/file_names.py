"""File names of exports: the base name of a device, by MIOpen's rule, or the one that the user
chose."""

from __future__ import annotations

import re

from tuna.errors import BadInput

UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
#: Longest name that every file system takes, less the extension and the suffix of a temporary file.
_MAX_NAME = 180


def base_name(arch: str, num_cu: int) -> str:
    """`gfx90a` and 104 give `gfx90a68`, `gfx906` and 60 give `gfx906_60`.

    MIOpen's `Handle::GetDbBasename`: more than 64 compute units in hexadecimal, else decimal after
    an underscore. Without compute units it is the architecture alone. Of `gfx90a:sramecc+:xnack+`
    only the name and `_xnack` stay, and characters that file systems refuse become underscores.
    """
    device, *features = arch.split(":")
    if "xnack+" in features:
        device += "_xnack"
    if device in ("gfx906", "gfx908") and "sramecc-" in features:
        device += "_nosramecc"
    device = UNSAFE.sub("_", device).strip("._-")[:_MAX_NAME] or "unknown"
    if num_cu <= 0:
        return device
    return f"{device}{num_cu:x}" if num_cu > 64 else f"{device}_{num_cu}"


def given_name(filename: str) -> str:
    """A base name that the user chose; raises BadInput if it is not one plain file name."""
    if (
        not filename
        or filename in (".", "..")
        or "/" in filename
        or "\0" in filename
        or len(filename) > _MAX_NAME
    ):
        raise BadInput(
            f"{filename!r} cannot be a file name.",
            hint="give a base name without directories; the extension is added",
        )
    return filename

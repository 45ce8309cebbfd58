"""Tiles in a pack, beside kernels: folders that `tuna export` wrote, where a server
reads them at its start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tuna.api import exporter_of
from tuna.common.files import NotPlain, read_plain
from tuna.errors import BadInput

#: Folder in a pack by the form, and the settings of programs that name it.
_FOLDERS = {"vllm-moe": "vllm", "sglang-moe": "sglang"}
SETTINGS = {
    "vllm": ("VLLM_TUNED_CONFIG_FOLDER",),
    "sglang": ("SGLANG_MOE_CONFIG_DIR",),
}
_MAX_FILE_BYTES = 16 << 20


def contents(folders: Iterable[Path]) -> dict[str, bytes]:
    """Return the files of these folders by their paths in a pack; raises BadInput for a folder that
    no server reads by a setting, and where two have the same file."""
    found: dict[str, bytes] = {}
    for folder in folders:
        form = exporter_of(folder).form
        if form not in _FOLDERS:
            raise BadInput(
                f"{folder} has the form {form}, which no server is told to read.",
                hint=f"forms for a pack: {', '.join(sorted(_FOLDERS))}",
            )
        for path in sorted(one for one in folder.rglob("*") if not one.is_dir()):
            name = f"{_FOLDERS[form]}/{path.relative_to(folder)}"
            if name in found:
                raise BadInput(f"{path} is in another folder of the pack too.")
            try:
                found[name] = read_plain(path, _MAX_FILE_BYTES)
            except (NotPlain, OSError) as error:
                raise BadInput(f"{path} cannot be packed: {error}") from None
    return found

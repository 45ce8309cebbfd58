"""The files of a Triton kernel as one file of a space: they are of one process, and are stored,
signed and evicted together."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: A name of a key or of a file in a space.
NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._+=@-]{1,255}", re.ASCII)
#: Beginning of the name of the list of a kernel's files, which Triton puts last.
INDEX = "__grp__"
#: End of the name of the file that has all of them, behind the name of the metadata; as long as
#: INDEX, so that both names have the same length.
KERNEL = ".kernel"
_HEAD_END = b"\n\n"


def stored_name(index: str) -> str:
    """Return the name in a space of the kernel whose files this list names."""
    return index.removeprefix(INDEX) + KERNEL


def joined(files: Mapping[str, bytes]) -> bytes:
    """Return files as one: a line `NAME BYTES` for each, by name, an empty line, their bytes."""
    names = sorted(files)
    head = "\n".join(f"{name} {len(files[name])}" for name in names)
    return b"".join((head.encode(), _HEAD_END, *(files[name] for name in names)))


def split(stored: str, data: bytes) -> dict[str, bytes]:
    """Return the files that `joined` made one, stored under this name.

    Raises ValueError for bytes that it did not make, for names that are none of files in a space,
    and where the kernel's metadata are missing.
    """
    head, _, _ = data.partition(_HEAD_END)
    files: dict[str, bytes] = {}
    start = len(head) + len(_HEAD_END)
    for line in head.decode("ascii").split("\n"):
        name, size = line.split(" ")
        if not NAME.fullmatch(name) or not size.isdecimal():
            raise ValueError(f"not a file of a kernel: {line[:80]!a}")
        end = start + int(size)
        files[name], start = data[start:end], end
    if start != len(data) or stored.removesuffix(KERNEL) not in files:
        raise ValueError(f"not the files of a kernel: {stored}")
    return files

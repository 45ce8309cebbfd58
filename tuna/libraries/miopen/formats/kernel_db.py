"""MIOpen's kernel db in SQLite: compiled code by name and build arguments, packed with bzip2.

What is Tuna's own choice for libraries that build one shared object for each layer (`object_name`,
`object_args`):

- name: `<solver>_<first 16 digits of the config's key>.so.o`; the `.o` because MIOpen's names end
  in it
- args: the layer's canonical driver command, `-DTUNA_ENVIRONMENT=<environment key>`,
  `-mcpu=<arch>`, which is the form of MIOpen's own (build options, then the device)
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tuna.errors import BadInput
from tuna.libraries.miopen.formats import database_file
from tuna.libraries.miopen.kernel_objects import MAX_BYTES, BadKernel, unpack
from tuna.libraries.results import KernelOf

TABLE = (
    "CREATE TABLE `kern_db` (`id` INTEGER PRIMARY KEY ASC,`kernel_name` TEXT NOT NULL,`kernel_args`"
    " TEXT NOT NULL,`kernel_blob` BLOB NOT NULL,`kernel_hash` TEXT NOT NULL,`uncompressed_size` INT"
    " NOT NULL)"
)
INDEX = "CREATE UNIQUE INDEX `idx_kern_db` ON kern_db(kernel_name, kernel_args)"
_COLUMNS = ("kernel_name", "kernel_args", "kernel_blob", "kernel_hash", "uncompressed_size")
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM kern_db ORDER BY id"  # noqa: S608 (constants)
_LOOKUP = (
    f"SELECT {', '.join(_COLUMNS[2:])} FROM kern_db "  # noqa: S608 (constants)
    "WHERE kernel_name = ? AND kernel_args = ? ORDER BY id LIMIT 1"
)


@dataclass(frozen=True)
class KernelRecord:
    """One code object."""

    name: str
    args: str
    code: bytes  #: code object that the loader takes, not packed


def object_name(solver: str, config_key: str) -> str:
    """The kernel name of a layer's shared object."""
    return f"{_quotable(solver)}_{config_key[:16]}.so.o"


def object_args(driver: str, environment_key: str, arch: str) -> str:
    """The kernel arguments of a layer's shared object: they name the layer and what it was built
    for."""
    return _quotable(
        f"{driver} -DTUNA_ENVIRONMENT={environment_key} -mcpu={arch.partition(':')[0]}"
    )


def names_of(kernel: KernelOf, arch: str) -> tuple[str, str]:
    """The name and arguments that the loader asks for, by MIOpen's rule where the library named the
    kernel."""
    arch = arch.partition(":")[0]
    if not kernel.name:
        return (
            object_name(kernel.solver, kernel.config_key),
            object_args(kernel.driver, kernel.environment_key, arch),
        )
    name = kernel.name if kernel.name.endswith(".o") else f"{kernel.name}.o"
    complete = "-mcpu=" in kernel.args or name.endswith(".mlir.o")
    return name, kernel.args if complete else f"{kernel.args} -mcpu={arch}"


def _quotable(text: str) -> str:
    # MIOpen puts both texts between single quotes when it looks a kernel up.
    return text.replace("'", "_")


def write(path: Path, records: Iterable[KernelRecord]) -> int:
    """Write the records, whose (name, args) must differ, into the empty file `path`; returns their
    number.

    A blob that bzip2 (level 9) does not shrink is stored as it is, with an uncompressed size of 0.
    """
    count = 0
    with database_file.create(path) as db:
        db.execute(TABLE)
        for count, record in enumerate(records, 1):
            # MIOpen's own check of what it unpacks, not a protection.
            digest = hashlib.md5(record.code, usedforsecurity=False).hexdigest()
            packed = bz2.compress(record.code, 9)
            blob, size = (
                (packed, len(record.code)) if len(packed) < len(record.code) else (record.code, 0)
            )
            db.execute(
                "INSERT INTO kern_db VALUES (?, ?, ?, ?, ?, ?)",
                (count, record.name, record.args, blob, digest, size),
            )
        db.execute(INDEX)
    return count


def read(path: Path) -> Iterator[KernelRecord]:
    """The kernels, unpacked and checked, in the order of their ids; raises BadInput if one is
    damaged."""
    with _open(path) as db:
        for name, args, blob, digest, size in db.execute(_SELECT):
            yield KernelRecord(
                name, args, _unpack(f"{path}: the kernel {name} is damaged", blob, digest, size)
            )


@contextlib.contextmanager
def lookup(path: Path) -> Iterator[Callable[[str, str], KernelRecord]]:
    """A function that gives the kernel of a name and arguments, which must be there."""
    with _open(path) as db:

        def find(name: str, args: str) -> KernelRecord:
            blob, digest, size = db.execute(_LOOKUP, (name, args)).fetchone()
            return KernelRecord(
                name, args, _unpack(f"{path}: the kernel {name} is damaged", blob, digest, size)
            )

        yield find


@contextlib.contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    with database_file.open_read_only(path) as db:
        database_file.check_columns(path, db, "kern_db", set(_COLUMNS), "kernel db")
        yield db


def _unpack(problem: str, blob: object, digest: str, size: object) -> bytes:
    if not isinstance(blob, bytes) or not isinstance(size, int) or not 0 <= size <= MAX_BYTES:
        raise BadInput(f"{problem}: its columns do not have the right types or sizes.")
    try:
        return unpack(blob, size, digest)
    except BadKernel as error:
        raise BadInput(f"{problem}: {error}.") from None

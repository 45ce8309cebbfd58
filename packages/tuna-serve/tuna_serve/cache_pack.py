"""Packs of a space of the cache: folders that Triton and Helion read without network and Tuna.

    triton/KEY/FILE         a TRITON_CACHE_DIR
    helion/KEY.best_config  a HELION_CACHE_DIR
    vllm/, sglang/          tiles that `tuna export` wrote
    sources.json            the source files of each kernel; see `pack_sources`
    manifest.json           space, place, and the SHA-256 of each file by its path
    manifest.sig            key id and signature (hex) of the manifest's SHA-256

The same entries make the same bytes, but that Triton's lists (`__grp__*`) name a kernel's files
by absolute paths, so that a pack is for the place where it will be read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import access_tokens, reading, transaction
from tuna.artifacts.signatures import PACK, Keys
from tuna.artifacts.store import Artifacts
from tuna.common.files import NotPlain, atomic_directory, read_plain
from tuna.errors import BadInput, NotFound, TunaError
from tuna_serve import pack_folders, pack_sources
from tuna_serve.db import cache_entries
from tuna_serve.db.cache_entries import MAX_FILE_BYTES, CacheEntry
from tuna_serve.pack_sources import SOURCES
from tuna_serve.programs import PROGRAMS, KeyFiles, Packed

_MANIFEST, _SIGNATURE = "manifest.json", "manifest.sig"
_MAX_HELD_CHARS = 255
_MAX_MANIFEST_BYTES = 1 << 30


class PackDamaged(TunaError):
    """The folder is not the pack that was written."""


@dataclass(frozen=True)
class PackPlan:
    """The space that is packed and the place where the pack is read."""

    space: str
    folder: Path
    at: Path  #: the folder's path where programs read it
    arch: str = ""  #: kernels of others are left out; empty: none are
    chosen: Sequence[Path] = ()  #: folders that `tuna export` wrote, to be read at start

    def __post_init__(self) -> None:
        access_tokens.check_space(self.space)
        if not self.at.is_absolute():
            raise BadInput(f"{self.at} is not absolute, as Triton needs it.", hint="--at /opt/pack")
        if len(held_by(self.folder)) > _MAX_HELD_CHARS:
            raise BadInput(f"The path {self.folder} is too long.")
        is_empty = self.folder.is_dir() and not any(self.folder.iterdir())
        if self.folder.exists() and not is_empty and not (self.folder / _MANIFEST).exists():
            raise BadInput(f"{self.folder} exists and is not a pack.", hint="give another folder")


def nothing_in(space: str) -> NotFound:
    """Return the error for a space without entries."""
    return NotFound(
        f"There is nothing in a space {space}.",
        hint="`tuna cache list` has the spaces; programs fill one as docs/adapters.md says",
    )


def held_by(folder: Path) -> str:
    """Name under which the pack in a folder holds entries."""
    return str(folder.resolve())


def write(engine: sa.Engine, plan: PackPlan, artifacts: Artifacts, keys: Keys) -> Packed:
    """Write a pack in place of one that is there; its keys are not evicted from then on.

    Raises NotFound where the space has no entry, BadInput, StorageFull.
    """
    with reading(engine) as connection:
        entries = cache_entries.entries_of(connection, plan.space)
    if not entries:
        raise nothing_in(plan.space)
    keys_read = {entry.key for entry in entries}
    hold, pack = cache_entries.hold, held_by(plan.folder)
    transaction(engine, hold, plan.space, keys_read, pack)  # none goes while they are read
    packed, kept = Packed(), set()
    with atomic_directory(plan.folder) as temporary:
        for key, files in itertools.groupby(entries, lambda entry: entry.key):
            chosen = _chosen(plan, key, _contents(files, artifacts), packed)
            _put(temporary, chosen, packed)
            if chosen:
                kept.add(key)
        _put(temporary, pack_folders.contents(plan.chosen), packed)
        if packed.origins:
            _put(temporary, {SOURCES: pack_sources.text(packed.origins).encode()}, packed)
        facts = {"space": plan.space, "at": str(plan.at), "arch": plan.arch}
        text = json.dumps({**facts, "files": packed.files}, indent=1, sort_keys=True) + "\n"
        signature = keys.sign(hashlib.sha256(text.encode()).hexdigest(), PACK).hex()
        (temporary / _MANIFEST).write_text(text)
        (temporary / _SIGNATURE).write_text(f"{keys.ids[0]} {signature}\n")
    transaction(engine, hold, plan.space, kept, pack)
    return packed


def _put(folder: Path, files: Mapping[str, bytes], packed: Packed) -> None:
    for path, data in files.items():
        packed.files[path] = hashlib.sha256(data).hexdigest()
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _contents(entries: Iterator[CacheEntry], artifacts: Artifacts) -> dict[str, bytes]:
    """The files of a key whose bytes are good."""
    found = {}
    for entry in entries:
        try:
            found[entry.file] = artifacts.get(entry.digest)
        except KeyError:
            continue  # a key that has nothing else is counted as incomplete
    return found


def _chosen(
    plan: PackPlan, key: str, files: Mapping[str, bytes], packed: Packed
) -> dict[str, bytes]:
    """The files of a key as the pack has them, by their paths in it."""
    chosen: dict[str, bytes] = {}
    left_out = packed.left_out
    for program in PROGRAMS:
        chosen |= program(KeyFiles(key, files, plan.at, plan.arch), packed)
    packed.incomplete += not chosen and packed.left_out == left_out
    return chosen


def check(folder: Path, keys: Keys) -> int:
    """Compare each file of a pack with its signed manifest; return their number.

    Raises PackDamaged, which names the first file that is not as it was written.
    """
    text = _read(folder / _MANIFEST, _MAX_MANIFEST_BYTES)
    key_id, _, signature = _read(folder / _SIGNATURE, 1024).decode(errors="replace").partition(" ")
    digest = hashlib.sha256(text).hexdigest()
    try:
        if not keys.is_valid(bytes.fromhex(signature), digest, key_id, PACK):
            raise ValueError
        files: dict[str, Any] = json.loads(text)["files"]
    except ValueError:
        raise PackDamaged(
            f"{folder} is not signed by a key of this installation.", hint="pack the space again"
        ) from None
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if more := sorted(present - files.keys() - {_MANIFEST, _SIGNATURE}):
        raise PackDamaged(f"{folder} has a file that was not packed: {more[0]}.")
    for path, wanted in files.items():
        if hashlib.sha256(_read(folder / path, MAX_FILE_BYTES)).hexdigest() != wanted:
            raise PackDamaged(f"{folder / path} was changed.", hint="pack the space again")
    return len(files)


def _read(path: Path, most_bytes: int) -> bytes:
    try:
        return read_plain(path, most_bytes)
    except NotPlain as error:
        raise PackDamaged(f"{path} is not a file of a pack: {error}.") from None
    except OSError as error:
        raise PackDamaged(f"{path} cannot be read: {error.strerror}.") from None

"""`tuna cache`: what programs share in spaces of the service's cache."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tuna.cli import options
from tuna.cli.console import print_json, print_table, say
from tuna.cli.groups import Group
from tuna.cli.query import since
from tuna.common.messages import counted, size
from tuna.errors import BadInput
from tuna_serve import api
from tuna_serve.db.cache_entries import CacheSpace
from tuna_serve.pack_folders import SETTINGS

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.group(cls=Group)
def cache() -> None:
    """List, prune, verify and pack what programs share in spaces of the cache.

    A program joins a space with a token: `tuna token create --role submit --space NAME`.
    """


@cache.command("list")
@click.argument("space", required=False)
@click.option(
    "--limit", type=options.COUNT, default=100, show_default=True, help="Keys of a space at most."
)
@options.as_json
def list_cache(space: str | None, limit: int, as_json: bool) -> None:
    """List spaces, or the keys of one, the newest first."""
    if space is None:
        spaces = api.list_spaces()
        if as_json:
            print_json(spaces)
            return
        if not spaces:
            say("No space has entries yet; docs/adapters.md says how programs fill one.", err=True)
            return
        columns = ("space", "keys", "files", "size", "refused", "held", "used")
        print_table(columns, map(_space_row, spaces), right=(1, 2, 3, 4, 5))
        return
    keys = api.list_cache(space, limit)
    if as_json:
        print_json(keys)
    else:
        of_keys = ("key", "files", "size", "put", "used")
        print_table(of_keys, map(_key_row, keys), right=(1, 2))


def _space_row(one: CacheSpace) -> tuple[object, ...]:
    counts = one.keys, one.files, size(one.size_bytes), one.refused, one.held
    return one.space, *counts, _minute(one.used_at)


def _key_row(one: dict[str, Any]) -> tuple[object, ...]:
    files: dict[str, int] = one["files"]
    times = _minute(one["created_at"]), _minute(one["used_at"])
    return one["key"], len(files), size(sum(files.values())), *times


def _minute(at: datetime) -> str:
    return at.isoformat(timespec="minutes")


@cache.command()
@click.argument("space")
@click.option("--key", "keys", multiple=True, help="A key, also one that a pack holds.")
@click.option(
    "--unused",
    "unused_since",
    callback=since,
    metavar="TIME",
    help="What was not used since 2026-03-31, or for 30d, but for what a pack holds.",
)
@click.option(
    "--pack",
    "gone",
    metavar="DIR",
    help="A pack that is gone: what it held can be evicted, and pruned as unused, from now on.",
)
def prune(
    space: str, keys: tuple[str, ...], unused_since: datetime | None, gone: str | None
) -> None:
    """Remove entries of a space, with their bytes."""
    found = api.prune_cache(space, keys, unused_since, Path(gone) if gone else None)
    freed = size(sum(one.size_bytes for one in found))
    say(f"{space}: {counted(len(found), 'file')} removed, {freed}")


@cache.command()
@click.argument("space", required=False)
@click.option(
    "--pack",
    metavar="DIR",
    type=_FOLDER,
    help="Instead, name the kernels of a pack that programs will not find, for their sources are"
    " others now.",
)
@click.option(
    "--site",
    metavar="DIR",
    type=_FOLDER,
    help="Where the programs' packages are, as .../site-packages (default: where they were).",
)
@click.option("--triton", default="", help="Version of the programs' Triton, as 3.8.0.")
@options.as_json
def verify(
    space: str | None, pack: Path | None, site: Path | None, triton: str, as_json: bool
) -> int:
    """Read the bytes of each entry, and name those that are damaged; exit 1 if there are any.

    Nobody gets a damaged entry. To repair it, put the file again, or prune its key.
    """
    if pack is not None:
        if space:
            raise BadInput("--pack takes its own DIR, and no space.")
        return _verify_pack(pack, site, triton, as_json)
    if site is not None or triton:
        raise BadInput("--site and --triton are for a pack.", hint="name it: --pack DIR")
    report = api.verify_cache(space)
    if as_json:
        print_json(report)
    else:
        for one in report.damaged:
            say(f"damaged: {one.space}/{one.key}/{one.file}")
        damaged = len(report.damaged)
        good = counted(report.checked - damaged, "file")
        say(f"{good} good, {size(report.size_bytes)}; {damaged} damaged")
    return 1 if report.damaged else 0


def _verify_pack(pack: Path, site: Path | None, triton: str, as_json: bool) -> int:
    found = api.verify_pack(pack, site, triton)
    if as_json:
        print_json(found)
    else:
        for name, reasons in found.missed.items():
            say(f"missed: {name} ({'; '.join(reasons)})", wrap=False)
        for name in found.unknown:
            say(f"sources unknown: {name}", wrap=False)
        kernels = counted(found.same, "kernel")
        say(f"{kernels} as installed; {len(found.missed)} missed; {len(found.unknown)} unknown")
    return 1 if found.missed else 0


@cache.command()
@click.argument("space", required=False)
@click.argument("folder", metavar="DIR", required=False, type=click.Path(path_type=Path))
@click.option("--arch", default="", help="Leave out kernels of others than gfx942, sm_90, ...")
@click.option(
    "--at",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Where programs will read it, as /opt/pack in an image (default: DIR).",
)
@click.option(
    "--check",
    "checked",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Instead, compare each file of a pack with its signed manifest.",
)
@click.option(
    "--tiles",
    "chosen",
    metavar="DIR",
    multiple=True,
    type=_FOLDER,
    help="A folder of tiles for vLLM or SGLang that `tuna export` wrote.",
)
def pack(
    space: str | None,
    folder: Path | None,
    arch: str,
    at: Path | None,
    checked: Path | None,
    chosen: tuple[Path, ...],
) -> None:
    """Write a space as a folder that Triton and Helion read without a network and without Tuna.

    What is packed is not evicted from the space.
    """
    if checked is not None:
        if space or arch or at or chosen:
            raise BadInput("--check takes its own DIR, and no other option.")
        say(f"{checked}: {counted(api.check_pack(checked), 'file')} as packed")
        return
    if space is None or folder is None:
        raise BadInput(
            "A space and a folder are needed.", hint="give both: `tuna cache pack SPACE DIR`"
        )
    packed = api.pack_cache(space, folder, at, arch, chosen)
    kinds = {"kernel": packed.kernels, "best config": packed.best_configs, "other": packed.others}
    say(f"{folder}: {', '.join(counted(number, kind) for kind, number in kinds.items())}")
    for number, reason in (
        (packed.of_other_archs, "of other architectures"),
        (packed.incomplete, "without all of their files"),
    ):
        if number:
            say(f"left out: {counted(number, 'key')} {reason}")
    where = at or folder.resolve()
    settings = [f"TRITON_CACHE_DIR={where}/triton", f"HELION_CACHE_DIR={where}/helion"]
    for name, variables in SETTINGS.items():
        if any(path.startswith(f"{name}/") for path in packed.files):
            settings += [f"{variable}={where}/{name}" for variable in variables]
    say(" ".join(settings), wrap=False)

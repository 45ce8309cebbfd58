"""Kernels of a pack beside the sources that are installed: each edit that gives Triton another key
is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tuna.errors import BadInput
from tuna_serve import pack_sources

TypeIn = Callable[..., Any]
TEXT = """\
WIDE = tl.constexpr(4)


@triton.jit
def kernel(x):
    # doubled
    y = x * WIDE
    return y + y


def host():
    return 1
"""
NAME = "triton/KEY/kernel"


def part(name: str, line: int, lines: int, constant: bool = False) -> dict[str, Any]:
    block = StringIO(TEXT).readlines()[line - 1 : line - 1 + lines]
    digest = hashlib.sha256("".join(block).encode()).hexdigest()
    facts = {"name": name, "line": line, "lines": lines}
    return {**facts, "constant": constant, "sha256": digest}


class Pack:
    """A pack with a kernel, and the file that it is from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pack"
        self.folder.mkdir()
        self.source = folder / "lib" / "site-packages" / "server" / "kernels.py"
        self.source.parent.mkdir(parents=True)
        self.source.write_text(TEXT)
        parts = [part("WIDE", 1, 1, constant=True), part("kernel", 5, 4)]
        digest = hashlib.sha256(TEXT.encode()).hexdigest()
        sources = [{"path": str(self.source), "sha256": digest, "parts": parts}]
        facts = {"arch": "sm_90", "triton_version": "3.8.0"}
        self.write(
            {NAME: {**facts, "sources": sources}, "triton/OLD/x": {**facts, "sources": None}}
        )

    def write(self, origins: Any) -> None:
        (self.folder / pack_sources.SOURCES).write_text(json.dumps(origins))


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return Pack(tmp_path)


def test_kernels_whose_sources_are_the_same_will_be_found(pack: Pack) -> None:
    found = pack_sources.check(pack.folder)
    assert (found.same, found.unknown, found.missed) == (1, ("triton/OLD/x",), {})


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("# doubled", "# twice", "kernel is changed"),
        ("@triton.jit\n", "# a comment\n@triton.jit\n", "kernel is in line 6, not 5"),
        ("y + y\n", "y + y\n    # the end\n", "kernel is changed"),
        ("y + y\n", "2 * y\n", "kernel is changed"),
        ("kernel(x)", "kernels(x)", "kernel is missing"),
        ("constexpr(4)", "constexpr(8)", "WIDE is changed"),
    ],
)
def test_one_edit_that_gives_another_key_is_named(
    pack: Pack, old: str, new: str, reason: str
) -> None:
    pack.source.write_text(TEXT.replace(old, new))
    assert pack_sources.check(pack.folder).missed == {NAME: (f"{pack.source}: {reason}",)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 1", "return 2  # another"),
        ("def host", "# a comment\ndef host"),
        ("WIDE = tl", "\nWIDE = tl"),
    ],
)
def test_an_edit_elsewhere_in_the_file_costs_no_kernel(pack: Pack, old: str, new: str) -> None:
    text = TEXT.replace(old, new)
    if old.startswith("WIDE"):
        text = text.replace("(4)\n\n\n", "(4)\n\n")  # the kernel stays where it was
    pack.source.write_text(text)
    assert pack_sources.check(pack.folder).missed == {}


def test_a_source_is_looked_for_where_the_packages_are(pack: Pack, tmp_path: Path) -> None:
    site = tmp_path / "image" / "dist-packages"
    (site / "server").mkdir(parents=True)
    moved = pack.source.rename(site / "server" / "kernels.py")
    assert pack_sources.check(pack.folder).missed == {NAME: (f"{pack.source} is missing",)}
    assert pack_sources.check(pack.folder, site).missed == {}
    moved.write_text("#\n" + TEXT)
    assert list(pack_sources.check(pack.folder, site).missed) == [NAME]


def test_kernels_of_another_triton_are_missed(pack: Pack) -> None:
    assert pack_sources.check(pack.folder, None, "3.8.0").missed == {}
    missed = pack_sources.check(pack.folder, None, "3.9.0").missed
    assert set(missed.values()) == {("of Triton 3.8.0, not 3.9.0",)}


@pytest.mark.parametrize("origins", [None, [], {"a": 1}, {"a": {"sources": [1]}}, {"a": {}}])
def test_a_pack_without_good_sources_is_refused(pack: Pack, origins: Any) -> None:
    pack.write(origins)
    if origins is None:
        (pack.folder / pack_sources.SOURCES).unlink()
    with pytest.raises(BadInput, match=r"sources"):
        pack_sources.check(pack.folder)


def test_the_command_names_the_kernel_and_ends_with_1(pack: Pack, type_in: TypeIn) -> None:
    words = ("tuna", "cache", "verify", "--pack", pack.folder)
    ended = type_in(*words)
    assert ended.code == 0
    assert ended.out.splitlines()[-1] == "1 kernel as installed; 0 missed; 1 unknown"
    pack.source.write_text("# a comment\n" + TEXT)
    ended = type_in(*words)
    assert ended.code == 1
    reason = f"{pack.source}: kernel is in line 6, not 5"
    assert f"missed: {NAME} ({reason})" in ended.out.splitlines()
    assert json.loads(type_in(*words, "--json").out)["missed"] == {NAME: [reason]}
    assert type_in(*words, "gpu").code == 2
    assert type_in("tuna", "cache", "verify", "--triton", "3.8.0").code == 2

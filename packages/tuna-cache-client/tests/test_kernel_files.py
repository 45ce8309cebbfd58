"""Kernels that several processes put into a space at once, each with other bytes, in the order of
Triton's compiler and remote cache manager. A double of the package `triton` suffices."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from space_double import SpaceDouble

from tuna_cache_client.remote_space import remote_space

KEY, INDEX = "ABC234", "__grp__add.json"
NAMES = ("add.ttir", "add.cubin", "add.json")
Backend = Callable[[str], Any]


class _BackendOfTriton:
    def __init__(self, key: str) -> None:
        pass


@pytest.fixture
def backend(in_space: SpaceDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Backend:
    """The adapter, with an empty folder of this machine."""
    if importlib.util.find_spec("triton") is None:
        knobs = SimpleNamespace(cache=SimpleNamespace(dir=""))
        contents: dict[str, dict[str, Any]] = {
            "triton": {"__version__": "3.8.0", "__file__": "/no/triton.py", "knobs": knobs},
            "triton.runtime": {},
            "triton.runtime.cache": {"RemoteCacheBackend": _BackendOfTriton},
        }
        for name, values in contents.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["triton"].runtime = sys.modules["triton.runtime"]  # type: ignore[attr-defined]
    adapter = importlib.import_module("tuna_cache_client.triton")
    del sys.modules[adapter.__name__]
    monkeypatch.setattr(adapter.knobs.cache, "dir", str(tmp_path / "triton"))
    return adapter.Cache  # type: ignore[no-any-return]


def files_of(writer: str) -> dict[str, bytes]:
    """A kernel's files, each with the name of its writer."""
    return {name: json.dumps({"by": writer, "file": name}).encode() for name in NAMES}


def puts(backend: Backend, writer: str) -> Iterator[str]:
    """Put a file at each step, the list of them last, in the order of Triton's compiler."""
    cache = backend(KEY)
    for name, data in files_of(writer).items():
        cache.put(name, data)
        yield name
    cache.put(INDEX, json.dumps({"child_paths": sorted(NAMES)}).encode())
    yield INDEX


def kernel(backend: Backend) -> dict[str, bytes]:
    """What another process has of the key, by the two questions of Triton's manager."""
    cache = backend(KEY)
    listed = cache.get([INDEX])
    return cache.get(json.loads(listed[INDEX])["child_paths"]) if listed else {}


@pytest.mark.parametrize("ahead", range(1, len(NAMES) + 1))
def test_two_processes_that_put_a_kernel_at_once_leave_that_of_one(
    backend: Backend, ahead: int
) -> None:
    first, second = puts(backend, "first"), puts(backend, "second")
    for _ in range(ahead):
        next(first)
    assert list(second)[-1] == INDEX
    assert list(first)[-1] == INDEX
    assert kernel(backend) == files_of("second"), "it was whole first"


def test_a_process_that_ends_in_the_middle_of_a_kernel_leaves_nothing_of_it(
    backend: Backend, in_space: SpaceDouble
) -> None:
    killed = puts(backend, "killed")
    for _ in NAMES:
        next(killed)
    assert kernel(backend) == {}
    assert in_space.files == {}
    list(puts(backend, "next"))
    assert kernel(backend) == files_of("next")


def test_a_kernel_that_was_put_file_by_file_is_none(backend: Backend) -> None:
    old = remote_space()
    for name, data in files_of("old").items():
        old.put(KEY, name, data)
    old.put(KEY, INDEX, json.dumps({"child_paths": sorted(NAMES)}).encode())
    assert kernel(backend) == {}, "its files may be of several processes"
    list(puts(backend, "new"))
    assert kernel(backend) == files_of("new")


def test_a_kernel_that_the_space_lost_is_replaced_as_a_whole(
    backend: Backend, in_space: SpaceDouble
) -> None:
    list(puts(backend, "first"))
    for lost in list(in_space.files):
        del in_space.files[lost]
        list(puts(backend, "second"))
        assert kernel(backend) == files_of("second")


def test_a_process_reads_back_the_files_that_it_compiled(backend: Backend) -> None:
    list(puts(backend, "first"))
    second = backend(KEY)
    second.put("add.ttir", b"mine")
    assert second.get(["add.ttir"]) == {"add.ttir": b"mine"}


def test_a_kernel_is_stored_as_the_service_documents_it(
    backend: Backend, in_space: SpaceDouble
) -> None:
    cache = backend(KEY)
    for name, data in (("add.json", b"{}"), ("add.cubin", b"\n\nELF"), ("add.ttir", b"")):
        cache.put(name, data)
    cache.put(INDEX, b"")
    stored = b"add.cubin 5\nadd.json 2\nadd.ttir 0\n\n\n\nELF{}"
    assert in_space.files == {(KEY, "add.json.kernel"): stored}


def test_a_kernel_takes_a_call_to_put_and_a_call_to_get(
    backend: Backend, in_space: SpaceDouble
) -> None:
    list(puts(backend, "first"))
    kernel(backend)
    assert [one.partition(" ")[0] for one in in_space.requests] == ["PUT", "GET"]


def test_kernel_of_this_machine_is_taken_whole_where_the_space_has_none(
    backend: Backend, tmp_path: Path
) -> None:
    folder = tmp_path / "triton" / KEY
    folder.mkdir(parents=True)
    for name, data in files_of("machine").items():
        (folder / name).write_bytes(data)
    (folder / INDEX).write_text(json.dumps({"child_paths": sorted(NAMES)}))
    remote_space().put(KEY, "add.cubin", b'{"by": "another"}')
    assert kernel(backend) == files_of("machine")


GARBAGE = (
    b"",
    b"add.json 2\n\n{",
    b"add.json 2\n\n{}}",
    b"add.json 2\nadd.ttir -1\n\n{}",
    b"add.json two\n\n{}",
    b"add.json 2 3\n\n{}",
    b"add.ttir 2\n\n{}",
    b"add.json 2\n../add.cubin 0\n\n{}",
    b"add.json 2\n" + b"x" * 300 + b" 0\n\n{}",
    b"\xff 2\n\n{}",
)


@pytest.mark.parametrize("data", GARBAGE)
def test_bytes_that_are_not_a_kernel_are_a_miss(
    backend: Backend, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    remote_space().put(KEY, "add.json.kernel", data)
    assert kernel(backend) == {}
    assert "a file cannot be parsed (ABC234/add.json.kernel)" in capsys.readouterr().err

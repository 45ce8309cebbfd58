"""Kernels that two programs share through `tuna serve`, and that a third one has from a pack. Needs
the extra `triton`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_triton_cache import CACHED_KERNELS, check_calls, compiled
from web_service import visitor_of

triton = pytest.importorskip("triton", reason="needs the extra `triton`")


class Service:
    """`tuna serve` on a home of its own, and the line of a token for its space `gpu`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        command = [sys.executable, "-m", "tuna", "serve", "--listen", "127.0.0.1:0"]
        environment = {**os.environ, "TUNA_HOME": str(home)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        words = ("token", "create", "--role", "submit", "--space", "gpu")
        self.line = self.tuna(*words, "--url", self.link.partition("/login")[0]).strip()

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.process.kill()
        self.process.wait()

    def tuna(self, *words: str) -> str:
        """The output of a command."""
        command = [sys.executable, "-m", "tuna", *words]
        environment = {**os.environ, "TUNA_HOME": str(self.home)}
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with contextlib.closing(Service(tmp_path / "home")) as running:
        yield running


@pytest.mark.drill(only=True)
def test_what_one_program_compiles_another_has_from_the_service(
    service: Service, tmp_path: Path
) -> None:
    first, told = compiled(tmp_path / "a", service.line)
    assert (first["compiled"], first["timed"], told) == (6, True, "")
    second, told = compiled(tmp_path / "b", service.line)
    assert (second["compiled"], second["timed"], told) == (0, False, "")
    assert (second["code"], second["best"]) == (first["code"], first["best"])

    wrong = service.line[:-64] + "7f" * 32
    third, told = compiled(tmp_path / "c", wrong)
    assert (third["compiled"], third["code"]) == (6, first["code"])
    assert told.count("not signed by the key that TUNA_CACHE pins") == told.count("\n") == 1

    stored = [path for path in (service.home / "artifacts").rglob("*") if path.is_file()]
    next(path for path in stored if b".hsaco " in path.read_bytes()).write_bytes(b"other")
    fourth, told = compiled(tmp_path / "d", service.line)
    assert (fourth["compiled"], fourth["code"], told) == (1, first["code"], "")
    assert compiled(tmp_path / "e", service.line)[0]["compiled"] == 0, "it is stored again"


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("act", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_ends_in_the_middle_changes_no_kernel(
    service: Service, tmp_path: Path, act: signal.Signals
) -> None:
    right, _ = compiled(tmp_path / "right", "")
    with visitor_of(service.link) as admin:

        def end_in_the_middle() -> None:
            files = 0
            while files < 3:
                entries = admin.get("/v1/cache/gpu").json()["entries"]
                files = sum(len(one["files"]) for one in entries)
            service.process.send_signal(act)

        thread = threading.Thread(target=end_in_the_middle)
        thread.start()
        broken, told = compiled(tmp_path / "a", service.line, 200)
        thread.join()
    assert broken["code"] == right["code"]
    check_calls(broken)
    assert told.count("tuna: cache: ") == told.count("\n")


@pytest.mark.drill(only=True)
def test_a_pack_is_read_without_network_and_without_tuna(service: Service, tmp_path: Path) -> None:
    isolated = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*isolated, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare --net is not allowed here")
    first, _ = compiled(tmp_path / "a", service.line)
    packs = [tmp_path / name for name in ("pack", "again")]
    for folder in packs:
        service.tuna("cache", "pack", "gpu", str(folder), "--at", str(packs[0]))
    service.tuna("cache", "pack", "--check", str(packs[0]))
    one, other = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in packs
    )
    assert one == other

    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = subprocess.check_output(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], text=True
    ).strip()
    # at the path that it has for the others, which is part of its keys for AMD
    Path(site, "triton.pth").write_text(f"{Path(triton.__file__).parents[1]}\n")
    script = shutil.copy(CACHED_KERNELS, tmp_path)
    environment = {"PATH": os.environ["PATH"], "TRITON_CACHE_DIR": str(packs[0] / "triton")}
    place: dict[str, Any] = {"env": environment, "cwd": tmp_path}
    missing = subprocess.run([python, "-c", "import tuna"], check=False, stderr=-1, **place)
    assert b"No module named 'tuna'" in missing.stderr
    command = [*isolated, str(python), str(script)]
    second: dict[str, Any] = json.loads(subprocess.check_output(command, **place))
    assert (second["compiled"], second["timed"]) == (0, False)
    assert (second["code"], second["best"]) == (first["code"], first["best"])

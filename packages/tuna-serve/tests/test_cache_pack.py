"""Packs of a space: what is in them, that they are equal, and that a change is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.db import access_tokens
from tuna.errors import BadInput, NotFound
from tuna.exports import registry
from tuna_serve import cache_pack
from tuna_serve.cache_pack import PackDamaged, PackPlan
from tuna_serve.db import cache_entries
from tuna_serve.db.cache_entries import CacheBounds, EntryName
from tuna_serve.programs import Packed

KEYS = Keys.of_secret("12" * 32)
BOUNDS = CacheBounds(1 << 30, 1 << 30)
CUDA, HIP = ({"backend": "cuda", "arch": 90}, {"backend": "hip", "arch": "gfx942"})


def _kernel(target: dict[str, object], code: str) -> dict[str, bytes]:
    """The files of a kernel."""
    return {
        f"add.{code}": b"\x7fELF" + code.encode(),
        "add.json": json.dumps({"target": target}).encode(),
    }


def _joined(files: dict[str, bytes]) -> bytes:
    """A kernel as `docs/service.md` has it."""
    head = "".join(f"{name} {len(data)}\n" for name, data in files.items())
    return head.encode() + b"\n" + b"".join(files.values())


KERNELS = {
    "AMD": _kernel(HIP, "hsaco"),
    "NVIDIA": _kernel(CUDA, "cubin"),
    "CUT": {**_kernel(HIP, "hsaco"), "add.json": b""},
}
ENTRIES: dict[str, dict[str, bytes]] = {
    **{key: {"add.json.kernel": _joined(files)} for key, files in KERNELS.items()},
    "TIMES": {"add.autotune.json": b"{}"},
    "LAUNCHER": {"hip_utils.cpython-311-x86_64-linux-gnu.so": b"\x7fELF"},
    "beef": {"beef.best_config": b"{}", "other.best_config": b"{}"},
    "PART": {"add.cubin": b"\x7fELF"},
    "ONEBYONE": {**KERNELS["AMD"], "__grp__add.json": b'{"child_paths": ["add.json"]}'},
    "NOKERNEL": {"add.json.kernel": b"7"},
    "ELSEWHERE": {"add.json.kernel": b"../../add.json 0\nadd.json 0\n\n"},
}


class Space:
    """The space `gpu` with entries, and packs of it."""

    def __init__(self, engine: sa.Engine, tmp_path: Path) -> None:
        self.engine, self.tmp_path = engine, tmp_path
        self.artifacts = Artifacts(f"file://{tmp_path / 'artifacts'}", tmp_path / "copies")
        with engine.begin() as connection:
            access_tokens.add(connection, "token", "secret", "submit", 60.0, space="gpu")
        for key, files in ENTRIES.items():
            for name, data in files.items():
                self.put(key, name, data)

    def put(self, key: str, name: str, data: bytes) -> None:
        digest = self.artifacts.put(data)
        entry = EntryName("gpu", key, name)
        with self.engine.begin() as connection:
            cache_entries.put(connection, entry, digest, len(data), "token", BOUNDS)

    def plan(self, folder: str = "pack", arch: str = "") -> PackPlan:
        return PackPlan("gpu", self.tmp_path / folder, Path("/opt/pack"), arch)

    def pack(self, folder: str = "pack", arch: str = "") -> Packed:
        return cache_pack.write(self.engine, self.plan(folder, arch), self.artifacts, KEYS)

    def held(self) -> set[str]:
        query = sa.text("SELECT key FROM cache_hold")
        with self.engine.connect() as connection:
            return set(connection.execute(query).scalars())


@pytest.fixture
def space(sqlite_engine: sa.Engine, tmp_path: Path) -> Space:
    return Space(sqlite_engine, tmp_path)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_pack_has_what_triton_and_helion_look_for(space: Space) -> None:
    packed = space.pack()
    found = _files(space.tmp_path / "pack")
    assert found.keys() - {"manifest.json", "manifest.sig", "sources.json"} == {
        *(f"triton/{key}/{name}" for key in KERNELS for name in (*KERNELS[key], "__grp__add.json")),
        *(f"triton/{key}/{name}" for key in ("TIMES", "LAUNCHER") for name in ENTRIES[key]),
        "helion/beef.best_config",
    }
    assert json.loads(found["triton/NVIDIA/__grp__add.json"])["child_paths"] == {
        name: f"/opt/pack/triton/NVIDIA/{name}" for name in ("add.cubin", "add.json")
    }
    assert found["triton/AMD/add.hsaco"] == KERNELS["AMD"]["add.hsaco"]
    counts = packed.kernels, packed.best_configs, packed.others, packed.incomplete
    assert counts == (3, 1, 2, 4)
    assert space.held() == {"AMD", "NVIDIA", "CUT", "TIMES", "LAUNCHER", "beef"}
    assert cache_pack.check(space.tmp_path / "pack", KEYS) == len(found) - 2


def test_a_pack_says_which_source_each_kernel_came_from(space: Space) -> None:
    sources = [{"path": "/a.py", "sha256": "12", "parts": []}]
    text = json.dumps({"target": CUDA, "triton_version": "3.8.0"}).encode()
    files = {**_kernel(CUDA, "cubin"), "add.json": text}
    files["add.sources"] = json.dumps(sources).encode()
    space.put("NEW", "add.json.kernel", _joined(files))
    space.pack()
    found = _files(space.tmp_path / "pack")
    origins = json.loads(found["sources.json"])
    assert origins["triton/NEW/add"] == {
        "arch": "sm_90",
        "triton_version": "3.8.0",
        "sources": sources,
    }
    assert origins["triton/AMD/add"]["sources"] is None
    assert "triton/NEW/add.sources" not in found
    paths = json.loads(found["triton/NEW/__grp__add.json"])["child_paths"]
    assert paths.keys() == {"add.cubin", "add.json"}


def test_tiles_that_a_server_reads_at_its_start_are_packed(space: Space) -> None:
    if "vllm-moe" not in {exporter.form for exporter in registry.exporters()}:
        pytest.skip("the forms are those of tuna-triton")
    tiles = space.tmp_path / "tiles"
    tiles.mkdir()
    (tiles / "E=8,N=64,device_name=NVIDIA_H200.json").write_text("{}")
    plan = replace(space.plan(), chosen=(tiles,))
    cache_pack.write(space.engine, plan, space.artifacts, KEYS)
    found = _files(plan.folder)
    assert found["vllm/E=8,N=64,device_name=NVIDIA_H200.json"] == b"{}"
    assert cache_pack.check(plan.folder, KEYS) == len(found) - 2
    with pytest.raises(BadInput, match="is in another folder of the pack too"):
        cache_pack.write(space.engine, replace(plan, chosen=(tiles, tiles)), space.artifacts, KEYS)
    none = replace(plan, chosen=(space.tmp_path / "artifacts",))
    with pytest.raises(BadInput, match="is not a database that Tuna reads"):
        cache_pack.write(space.engine, none, space.artifacts, KEYS)


def test_kernels_of_other_architectures_are_left_out_when_one_is_named(space: Space) -> None:
    packed = space.pack(arch="sm_90")
    assert (packed.kernels, packed.of_other_archs) == (1, 2)
    assert not (space.tmp_path / "pack" / "triton" / "AMD").exists()
    assert space.held() == {"NVIDIA", "TIMES", "LAUNCHER", "beef"}


def test_two_packs_of_one_space_are_equal_byte_by_byte(space: Space) -> None:
    space.pack("a")
    space.pack("b")
    assert _files(space.tmp_path / "a") == _files(space.tmp_path / "b")
    space.put("NEW", "mul.autotune.json", b"{}")
    space.pack("b")
    assert _files(space.tmp_path / "b").keys() - _files(space.tmp_path / "a").keys() == {
        "triton/NEW/mul.autotune.json"
    }


def test_an_entry_whose_bytes_were_changed_in_the_store_is_left_out(space: Space) -> None:
    digest = space.artifacts.put(ENTRIES["AMD"]["add.json.kernel"])
    next((space.tmp_path / "artifacts").rglob(digest)).write_bytes(b"other")
    packed = space.pack()
    assert packed.incomplete == 5
    assert "AMD" not in space.held()


@pytest.mark.parametrize("act", ["change", "remove", "add", "link", "manifest", "signature"])
def test_a_pack_that_is_not_as_it_was_written_is_refused_by_name(space: Space, act: str) -> None:
    space.pack()
    folder = space.tmp_path / "pack"
    path = folder / "triton" / "AMD" / "add.hsaco"
    if act == "change":
        path.write_bytes(path.read_bytes() + b"0")
    elif act == "add":
        path = path.with_name("mul.so")
        path.write_bytes(b"")
    elif act in ("manifest", "signature"):
        path = folder
        name = folder / ("manifest.json" if act == "manifest" else "manifest.sig")
        name.write_text(name.read_text().replace("a", "b"))
    else:
        path.unlink()
        if act == "link":
            path.symlink_to("/etc/hostname")
    with pytest.raises(PackDamaged, match=path.name):
        cache_pack.check(folder, KEYS)


def test_a_pack_of_another_installation_is_refused(space: Space) -> None:
    space.pack()
    former = Keys.of_secret("34" * 32, KEYS.public)
    assert cache_pack.check(space.tmp_path / "pack", former)
    with pytest.raises(PackDamaged, match="not signed by a key of this installation"):
        cache_pack.check(space.tmp_path / "pack", Keys.of_secret("34" * 32))


def test_bad_input_is_refused_before_anything_is_written(space: Space) -> None:
    (space.tmp_path / "mine").mkdir()
    (space.tmp_path / "mine" / "photo").touch()
    for plan in (
        {"folder": space.tmp_path / "mine"},
        {"folder": space.tmp_path / "mine" / "photo"},
        {"at": Path("pack")},
        {"space": "../gpu"},
        {"folder": space.tmp_path / ("n" * 250)},
    ):
        with pytest.raises(BadInput):
            replace(space.plan(), **plan)
    nothing = replace(space.plan(), space="nothing")
    with pytest.raises(NotFound):
        cache_pack.write(space.engine, nothing, space.artifacts, KEYS)
    assert not nothing.folder.exists()
    assert space.held() == set()

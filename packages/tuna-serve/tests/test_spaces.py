"""Caches that programs share, over HTTP: what holders of a space's token get, and nobody else."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from command_lines import Ended
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi.testclient import TestClient

from tuna import api
from tuna.db.engine import reading, writing
from tuna.db.models import CacheEntryRow
from tuna.db.types import from_epoch
from tuna.errors import StorageFull
from tuna.settings import get_settings
from tuna_serve import api as caches
from tuna_serve.db import cache_entries
from tuna_serve.requests.uploads import forget

Member = Callable[..., httpx.Client]
Holder = Callable[..., httpx.Client]
SPACE = "/v1/cache/team"


@pytest.fixture
def member(client: TestClient) -> Member:
    """`member("team")`: a program with a token of this space; `.line` is the token's line."""

    def make(space: str = "team") -> httpx.Client:
        line = api.create_space_token(space, 60.0, "http://127.0.0.1:8080/")
        address, _, secrets = line.partition("#")
        assert address == f"http://127.0.0.1:8080/v1/cache/{space}"
        token, _, public = secrets.rpartition(".")
        headers = {"authorization": f"Bearer {token}", "x-public": public}
        return TestClient(
            client.app,
            str(client.base_url),
            raise_server_exceptions=False,
            headers=headers,
        )

    return make


def rows() -> list[sa.Row]:
    with reading(api.open_database()) as connection:
        return list(connection.execute(sa.select(CacheEntryRow.__table__)))


def stored() -> list[Path]:
    """Files of artifacts and uploads."""
    home = get_settings().home
    return [
        path
        for name in ("artifacts", "uploads")
        for path in (home / name).rglob("*")
        if path.is_file()
    ]


def verify(public: str, text: str, signature: str) -> None:
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    key.verify(bytes.fromhex(signature.split()[1]), b"tuna cache\0" + text.encode())


def test_what_one_puts_another_gets_signed(member: Member) -> None:
    one, other = member(), member()
    answer = one.put(f"{SPACE}/K/a.cubin", content=b"code")
    assert answer.status_code == 201
    assert one.put(f"{SPACE}/K/a.cubin", content=b"code").status_code == 200
    found = other.get(f"{SPACE}/K/a.cubin")
    assert (found.status_code, found.content) == (200, b"code")
    digest = found.headers["etag"].strip('"')
    public, signature = one.headers["x-public"], found.headers["tuna-signature"]
    verify(public, f"team\0K\0a.cubin\0{digest}", signature)
    for text in (f"team\0K\0b.cubin\0{digest}", f"other\0K\0a.cubin\0{digest}", digest):
        with pytest.raises(InvalidSignature):
            verify(public, text, signature)


def test_other_bytes_are_refused_and_counted(member: Member) -> None:
    one = member()
    one.put(f"{SPACE}/K/f", content=b"first")
    before = stored()
    for content in (b"other", b""):
        answer = one.put(f"{SPACE}/K/f", content=content)
        assert (answer.status_code, "Other bytes" in answer.json()["error"]) == (409, True)
    assert one.get(f"{SPACE}/K/f").content == b"first"
    assert (rows()[0].refused, stored()) == (2, before)


def test_a_batch_has_what_is_there(member: Member) -> None:
    one = member()
    for file in ("a", "b"):
        one.put(f"{SPACE}/K/{file}", content=file.encode() * 3)
    answer = one.get(f"{SPACE}/K", params={"file": ["b", "gone", "a", "b"]})
    head, _, content = answer.content.partition(b"\n")
    assert (answer.status_code, content) == (200, b"bbbaaa")
    for entry, file in zip(json.loads(head), "ba", strict=True):
        assert (entry["file"], entry["bytes"]) == (file, 3)
        text = f"team\0K\0{file}\0{entry['sha256']}"
        verify(one.headers["x-public"], text, entry["signature"])
    assert one.get(f"{SPACE}/nothing", params={"file": "a"}).content == b"[]\n"
    assert one.get(f"{SPACE}/K").status_code == 422
    assert one.get(f"{SPACE}/K", params={"file": ["x"] * 65}).status_code == 422


def test_files_that_two_old_programs_put_one_by_one_are_not_given_as_one_kernel(
    member: Member,
) -> None:
    one, other = member(), member()
    listed = json.dumps({"child_paths": ["add.cubin", "add.json"]}).encode()
    assert one.put(f"{SPACE}/K/add.cubin", content=b"one's").status_code == 201
    assert other.put(f"{SPACE}/K/add.cubin", content=b"other's").status_code == 409
    assert other.put(f"{SPACE}/K/add.json", content=b'{"by": "other"}').status_code == 201
    before = rows()
    for program in (one, other):
        answer = program.put(f"{SPACE}/K/__grp__add.json", content=listed)
        assert (answer.status_code, "put as one" in answer.json()["error"]) == (422, True)
        assert "tuna-cache-client" in answer.json()["hint"]
        assert program.get(f"{SPACE}/K", params={"file": "__grp__add.json"}).content == b"[]\n"
    assert rows() == before


def test_the_list_of_a_kernel_that_a_former_version_stored_is_not_given(member: Member) -> None:
    one = member()
    one.put(f"{SPACE}/K/add.json", content=b"{}")
    with writing(api.open_database()) as connection:
        connection.execute(sa.update(CacheEntryRow).values(file="__grp__add.json"))
    assert one.get(f"{SPACE}/K/__grp__add.json").status_code == 404
    assert one.get(f"{SPACE}/K", params={"file": "__grp__add.json"}).content == b"[]\n"


def test_a_large_file_is_sent_in_parts(member: Member) -> None:
    one, content = member(), bytes(range(256)) * (3 << 12)
    assert one.put(f"{SPACE}/K/large", content=content).status_code == 201
    assert one.get(f"{SPACE}/K/large").content == content
    head, _, rest = one.get(f"{SPACE}/K", params={"file": "large"}).content.partition(b"\n")
    assert (json.loads(head)[0]["bytes"], rest) == (len(content), content)


NAMES = ("..", "%2e%2e", "a%00", "x" * 300, "a%2Fb", "a%20b", "%C3%A4", "a\\b")


def test_path_tricks_leave_nothing(member: Member) -> None:
    one = member()
    url = f"{one.base_url}{SPACE}"
    for name in NAMES:
        for path in (f"{url}/{name}/f", f"{url}/K/{name}", f"{url}/../{name}/K/f"):
            sent = httpx.Request("PUT", path, content=b"x", headers=one.headers)
            sent.url = sent.url.copy_with(raw_path=path.removeprefix(str(one.base_url)).encode())
            answer = one.send(sent)
            assert answer.status_code in (404, 405, 422), (path, answer.status_code)
    assert (rows(), stored()) == ([], [])


def test_more_than_64_mib_are_refused_with_and_without_a_length(member: Member) -> None:
    one, part = member(), bytes(1 << 20)
    length = {"content-length": str(65 << 20)}
    for answer in (
        one.put(f"{SPACE}/K/f", content=b"x", headers=length),
        one.put(f"{SPACE}/K/f", content=(part for _ in range(65))),
    ):
        assert (answer.status_code, "64 MiB" in answer.json()["error"]) == (413, True)
    assert (rows(), stored()) == ([], [])


def test_a_full_disk_leaves_nothing(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    one = member()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, before[1]))  # as a quota has it
    try:
        answer = one.put(f"{SPACE}/K/f", content=bytes(24 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (answer.status_code, "No space is left" in answer.json()["error"]) == (507, True)

    def full(*_: object) -> None:
        raise StorageFull("There is no space left for the database.")

    with monkeypatch.context() as patch:
        patch.setattr(cache_entries, "put", full)
        assert one.put(f"{SPACE}/K/f", content=b"x").status_code == 507
    assert (rows(), stored()) == ([], [])
    assert one.put(f"{SPACE}/K/f", content=b"x").status_code == 201


def test_a_bound_that_packs_hold_is_told_and_leaves_nothing(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_SPACE_MIB", "1")
    get_settings.cache_clear()
    one = member()
    assert one.put(f"{SPACE}/old/f", content=bytes(700 << 10)).status_code == 201
    assert one.put(f"{SPACE}/new/f", content=b"x" * (700 << 10)).status_code == 201
    assert [row.key for row in rows()] == ["new"]
    before = stored()
    assert len(before) == 1  # what is evicted leaves the store
    with writing(api.open_database()) as connection:
        cache_entries.hold(connection, "team", ["new"], "pack")
    answer = one.put(f"{SPACE}/third/f", content=b"y" * (700 << 10))
    assert (answer.status_code, "packs hold" in answer.json()["error"]) == (429, True)
    assert ([row.key for row in rows()], stored()) == (["new"], before)


def test_another_space_is_as_if_there_were_none(member: Member, holder: Holder) -> None:
    one, other, plain = member(), member("other"), holder("submit")
    one.put(f"{SPACE}/K/f", content=b"x")
    asked = (
        ("GET", f"{SPACE}/K/f"),
        ("GET", f"{SPACE}/K?file=f"),
        ("GET", SPACE),
        ("PUT", f"{SPACE}/K/g"),
    )
    for visitor in (other, plain):
        for method, path in asked:
            answer = visitor.request(method, path)
            nowhere = visitor.request(method, path.replace("team", "nowhere"))
            assert (answer.status_code, nowhere.status_code) == (404, 404), path
            assert answer.json()["error"] == nowhere.json()["error"].replace("nowhere", "team")
    assert len(rows()) == 1


def test_roles_in_a_space(member: Member, holder: Holder, client: TestClient) -> None:
    member().put(f"{SPACE}/K/f", content=b"x")
    admin = holder("admin")
    assert admin.get(f"{SPACE}/K/f").content == b"x"
    (entry,) = admin.get(SPACE).json()["entries"]
    assert (entry["key"], entry["files"]) == ("K", {"f": 1})
    for visitor, status in ((admin, 403), (holder("read"), 403), (client, 401)):
        assert visitor.put(f"{SPACE}/K/g", content=b"y").status_code == status
        if visitor is not admin:
            assert visitor.get(f"{SPACE}/K/f").status_code == status
    assert (len(rows()), len(stored())) == (1, 1)


def test_a_token_of_a_space_reaches_nothing_else(member: Member) -> None:
    one = member()
    paths = one.get("/v1/openapi.json").json()["paths"]
    asked = [(method, path) for path, methods in paths.items() for method in methods]
    asked += [("get", path) for path in ("/", "/requests", "/metrics", "/sessions")]
    for method, path in asked:
        if path.startswith("/v1/cache"):
            continue
        for name in ("session_id", "request_id", "job_id", "version"):
            path = path.replace(f"{{{name}}}", "1")
        answer = one.request(method, path)
        assert answer.status_code == 403, (method, path, answer.status_code)


def test_a_damaged_entry_is_a_miss_is_named_and_is_repaired(
    member: Member, type_in: Callable[..., Ended]
) -> None:
    one = member()
    for file in ("good", "bad"):
        one.put(f"{SPACE}/K/{file}", content=file.encode() * 9)
    assert type_in("tuna", "cache", "verify").code == 0
    (path,) = [path for path in stored() if path.read_bytes().startswith(b"bad")]
    path.write_bytes(b"BAD" + path.read_bytes()[3:])
    assert one.get(f"{SPACE}/K/bad").status_code == 404
    both = one.get(f"{SPACE}/K", params={"file": ["bad", "good"]}).content
    assert both.endswith(b"\n" + b"good" * 9)
    for words in ((), ("team",)):
        ended = type_in("tuna", "cache", "verify", *words)
        assert (ended.code, "damaged: team/K/bad\n1 file good" in ended.out) == (1, True)
    assert one.put(f"{SPACE}/K/bad", content=b"bad" * 9).status_code == 200
    assert one.get(f"{SPACE}/K/bad").content == b"bad" * 9
    path.unlink()  # as Redis loses them
    assert one.put(f"{SPACE}/K/bad", content=b"other").status_code == 201
    assert one.get(f"{SPACE}/K/bad").content == b"other"
    for path in stored():
        path.write_bytes(path.read_bytes()[:-1])
    assert one.put(f"{SPACE}/K/bad", content=b"third").status_code == 201
    assert sorted(path.read_bytes() for path in stored()) == [b"good" * 8 + b"goo", b"third"]
    assert one.put(f"{SPACE}/K/bad", content=b"bad" * 9).status_code == 409


def test_a_new_key_signs_at_once(
    with_redis: None, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuna_serve.web.spaces._KNOWN_S", -1.0)  # it is looked up each second
    one = member()
    one.put(f"{SPACE}/K/f", content=b"x")
    old = one.get(f"{SPACE}/K/f").headers["tuna-signature"]
    api.rotate_key(leaked=True)
    new = one.get(f"{SPACE}/K/f").headers["tuna-signature"]
    digest = rows()[0].digest
    verify(member().headers["x-public"], f"team\0K\0f\0{digest}", new)
    assert new.split()[0] != old.split()[0]


def test_a_use_is_written_down_once_a_minute(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuna_serve.web.spaces._WRITTEN_S", -1.0)
    one = member()
    one.put(f"{SPACE}/K/f", content=b"x")
    before = rows()[0].used_at
    one.get(f"{SPACE}/K/f")
    assert rows()[0].used_at == before
    with writing(api.open_database()) as connection:
        connection.execute(sa.update(CacheEntryRow).values(used_at=from_epoch(1e9)))
    one.get(f"{SPACE}/K/f")
    assert rows()[0].used_at > before


def test_bytes_that_an_entry_has_are_not_forgotten(member: Member) -> None:
    member().put(f"{SPACE}/K/f", content=b"x")
    member("other").put("/v1/cache/other/K/f", content=b"x")
    forget(rows()[0].digest)
    assert len(stored()) == 1
    assert len(caches.prune_cache("team", ["K"])) == 1
    assert len(stored()) == 1
    caches.prune_cache("other", ["K"])
    assert stored() == []


def test_the_commands_of_the_cache(member: Member, type_in: Callable[..., Ended]) -> None:
    ended = type_in("tuna", "token", "create", "--role", "submit", "--space", "team")
    assert ended.out.startswith("http://127.0.0.1:8080/v1/cache/team#")
    for words, error in (
        (("--role", "read", "--space", "team"), "role submit"),
        (("--role", "submit", "--space", "../x"), "not a name of a space"),
        (("--role", "submit", "--space", "t", "--url", "ftp://x"), "not the URL of a service"),
        (("--role", "submit", "--url", "http://x"), "of a space"),
    ):
        refused = type_in("tuna", "token", "create", *words)
        assert (refused.code, error in refused.err) == (2, True), refused.err
    one = member()
    for key in ("a", "b"):
        one.put(f"{SPACE}/{key}/f", content=key.encode())
    one.put(f"{SPACE}/a/f", content=b"other")
    (space,) = json.loads(type_in("tuna", "cache", "list", "--json").out)
    assert (space["keys"], space["refused"], space["size_bytes"]) == (2, 1, 2)
    assert "team" in type_in("tuna", "cache", "list").out
    assert type_in("tuna", "cache", "list", "team").out.index(" b ") > 0
    assert type_in("tuna", "cache", "list", "nobody").code == 3
    assert type_in("tuna", "cache", "prune", "team").code == 2
    assert type_in("tuna", "cache", "prune", "team", "--key", "c").code == 3
    assert type_in("tuna", "cache", "prune", "team", "--unused", "1d").out.startswith("team: 0")
    assert type_in("tuna", "cache", "prune", "team", "--key", "a").out.startswith("team: 1 file")
    assert [row.key for row in rows()] == ["b"]


def test_a_pack_that_is_gone_holds_nothing_any_more(
    member: Member, type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    one = member()
    for file in ("f", "g"):
        one.put(f"{SPACE}/K/{file}", content=b"{}")
    with writing(api.open_database()) as connection:
        cache_entries.hold(connection, "team", ["K"], str(tmp_path / "pack"))
        connection.execute(sa.update(CacheEntryRow).values(used_at=from_epoch(1e9)))
    unused = ("tuna", "cache", "prune", "team", "--unused", "1d")
    assert type_in(*unused).out.startswith("team: 0 files")
    refused = type_in(*unused, "--pack", str(tmp_path / "other"))
    assert (refused.code, f"packs: {tmp_path / 'pack'}" in refused.err) == (3, True), refused.err
    assert len(rows()) == 2
    ended = type_in(*unused, "--pack", str(tmp_path / "pack"))
    assert (ended.code, ended.out[:13]) == (0, "team: 2 files")
    assert rows() == []


def test_the_functions_of_the_cache_are_imported_when_they_are_used() -> None:
    heavy = {"sqlalchemy", "fastapi", "pydantic", "tuna_serve.api.spaces"}
    code = f"import sys; from tuna_serve import api; print({heavy} & {{*sys.modules}}, dir(api))"
    program = [sys.executable, "-c", code]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("set() ['VerifiedCache', 'check_pack', 'list_cache',")

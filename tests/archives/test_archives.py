"""A session goes into a file and out of it, into this or another database, and is the same; bad
files change nothing."""

from __future__ import annotations

import gzip
import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from baseline_database import SESSIONS, facts
from jobs_builder import make_jobs
from queries import execute, read_column

from tuna.archives import tables
from tuna.archives.archive import archive, verify
from tuna.archives.restore import restore
from tuna.configs import Config, ConvConfig, from_json_text, parse_line
from tuna.configs.problem import text_of
from tuna.db import configs
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import (
    Base,
    ConfigRow,
    ConvConfigRow,
    EnvironmentRow,
    Job,
    KernelRow,
    Session,
)
from tuna.errors import BadInput, NotFound
from tuna.libraries.base import Environment

LAYER = "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -F 1"
ENVIRONMENT = Environment("tvm", "0.27.0", "znver5", 2, "tvm-0.27.0")


def from_driver(line: str) -> Config:
    (layer,) = parse_line(line)
    return layer


def counts(engine: sa.Engine) -> dict[str, int]:
    with reading(engine) as connection:
        return {
            name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for name, table in Base.metadata.tables.items()
        }


def contents(path: Path) -> list[Any]:
    """The lines of an archive."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def rewritten(path: Path, lines: list[Any]) -> Path:
    """A file with these lines and the hash that they have."""
    data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines[:-1])
    end = (
        json.dumps(["end", hashlib.sha256(data).hexdigest()], separators=(",", ":")).encode()
        + b"\n"
    )
    path.write_bytes(gzip.compress(data + end))
    return path


@pytest.mark.parametrize("session_id", SESSIONS)
def test_another_tuna_restores_identical_rows(
    source: sa.Engine, engine: sa.Engine, tmp_path: Path, session_id: int
) -> None:
    """An archive of what was restored is the same file, byte for byte, whichever database it is
    in."""
    first, again = tmp_path / "first", tmp_path / "again"
    header = archive(source, session_id, first)
    found = restore(engine, first)
    assert (found.session_id, found.jobs, found.new_ids) == (session_id, header.jobs, ())
    archive(engine, session_id, again)
    assert again.read_bytes() == first.read_bytes()
    assert {name for name, _ in contents(first)[1:-1]} <= {*tables.SHARED, *tables.OWN, "batch"}
    with reading(engine) as connection:
        for digest, blob in connection.execute(sa.select(KernelRow.digest, KernelRow.blob)):
            assert hashlib.sha256(blob).hexdigest() == digest


@pytest.mark.both_databases_in_drills
def test_where_ids_are_taken_the_session_gets_new_ones(
    source: sa.Engine, engine: sa.Engine, tmp_path: Path
) -> None:
    make_jobs(engine, 3)
    before = counts(engine)
    others = {}
    for session_id in SESSIONS:
        archive(source, session_id, tmp_path / str(session_id))
        found = restore(engine, tmp_path / str(session_id))
        others[session_id] = found.session_id
        assert facts(engine, found.session_id) == facts(source, session_id)
        if session_id == 1:
            assert set(found.new_ids) >= {"session", "job"}
    assert len({*others.values(), 1}) == len(SESSIONS) + 1
    there, origin = counts(engine), counts(source)
    for name in (
        "job",
        "trial",
        "step_result",
        "find_db",
        "find_db_kernel",
        "solver_applicability",
    ):
        assert there[name] - before[name] == origin[name], name
    assert there["kernel"] <= origin["kernel"]
    assert len(facts(engine, 1)["job"]) == 30, "and the session that was there is as it was"


def test_a_session_is_restored_once(source: sa.Engine, engine: sa.Engine, tmp_path: Path) -> None:
    archive(source, 2, tmp_path / "file")
    restore(engine, tmp_path / "file")
    before = counts(engine)
    for reason in (None, "another"):
        with pytest.raises(BadInput, match="is session 2, which is here already"):
            restore(engine, tmp_path / "file", reason)
    with pytest.raises(BadInput, match="here already"):
        restore(source, tmp_path / "file")
    assert counts(engine) == before


def test_a_session_of_the_same_environment_and_reason_needs_another_reason(
    source: sa.Engine, engine: sa.Engine, tmp_path: Path
) -> None:
    archive(source, 2, tmp_path / "file")
    restore(engine, tmp_path / "file")
    execute(engine, sa.update(Session).values(uuid="another one"))
    before = counts(engine)
    with pytest.raises(BadInput, match="same reason") as error:
        restore(engine, tmp_path / "file")
    assert "--reason" in error.value.hint
    assert counts(engine) == before
    found = restore(engine, tmp_path / "file", "from elsewhere")
    assert found.reason == "from elsewhere"
    assert facts(engine, found.session_id) == facts(source, 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, _upgraded: Path) -> bytes:
    """An archive."""
    path = tmp_path_factory.mktemp("whole") / "file"
    archive(make_engine(f"sqlite:///{_upgraded}"), 2, path)
    return path.read_bytes()


def _flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "cut off"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: data[:30], "cut off|not an archive"),
        (lambda data: b"", "not an archive"),
        (lambda data: b"PK\x03\x04 a zip file", "not an archive"),
        (lambda data: gzip.compress(b"some text\nof somebody\n"), "not an archive"),
        (lambda data: gzip.compress(b'["other",{}]\n'), "not an archive"),
        (lambda data: gzip.compress(b"[" * 100_000), "not an archive"),
        (lambda data: _flipped(data, len(data) // 2), "damaged|cut off"),
        (lambda data: _flipped(data, len(data) - 6), "damaged"),
        (
            lambda data: gzip.compress(
                gzip.decompress(data).replace(b'"evaluated"', b'"errored"', 1)
            ),
            "damaged",
        ),
        (lambda data: gzip.compress(gzip.decompress(data)[:-200]), "cut off|damaged"),
        (lambda data: gzip.compress(gzip.decompress(data) + b"more"), "damaged"),
        (
            lambda data: gzip.compress(
                gzip.decompress(data).replace(b'"version":1', b'"version":2', 1)
            ),
            "version 2",
        ),
    ],
    ids=range(14),
)
def test_a_file_that_is_damaged_cut_off_or_foreign_is_refused_before_anything_is_written(
    sqlite_engine: sa.Engine, tmp_path: Path, whole: bytes, damage: Any, says: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(damage(whole))
    before = counts(sqlite_engine)
    with pytest.raises(BadInput, match=says):
        restore(sqlite_engine, path)
    assert counts(sqlite_engine) == before


def _row(lines: list[Any], name: str) -> list[Any]:
    return next(line[1] for line in lines if line[0] == name)


def _changed(lines: list[Any], name: str, **values: Any) -> None:
    """Change columns of the first row of a table."""
    for column, value in values.items():
        _row(lines, name)[lines[0][1]["columns"][name].index(column)] = value


def _without(lines: list[Any], name: str) -> None:
    lines.remove(next(line for line in lines if line[0] == name))


@pytest.mark.parametrize(
    "forge",
    [
        lambda lines: _row(lines, "kernel").__setitem__(1, "ZXZpbA=="),
        lambda lines: _row(lines, "job").__setitem__(1, 999),
        lambda lines: _row(lines, "job").__setitem__(6, None),
        lambda lines: _row(lines, "job").append(1),
        lambda lines: _row(lines, "trial").__setitem__(2, "1); DROP TABLE job"),
        lambda lines: lines.insert(5, ["installation", [1, "n", "s"]]),
        lambda lines: lines[0][1]["columns"].__setitem__("job", ["id", "nosuch"]),
        lambda lines: lines[0][1]["columns"].__setitem__("job", ["id"]),
        lambda lines: lines[0][1].pop("uuid"),
        lambda lines: _row(lines, "job").__setitem__(0, 10**30),
        lambda lines: _row(lines, "trial").__setitem__(-1, "2026-11-22T12:00:00"),
        lambda lines: _row(lines, "trial").__setitem__(5, "\ud800"),
        lambda lines: _row(lines, "find_db").__setitem__(5, float("nan")),
        lambda lines: lines[0][1].__setitem__("uuid", {}),
        lambda lines: lines[0][1].__setitem__("uuid", "../../../etc/cron.d/tuna"),
        lambda lines: lines[0][1].__setitem__("uuid", "a/b"),
        lambda lines: lines[0][1].__setitem__("ids", {"job": "x"}),
        lambda lines: lines[0][1].__setitem__("columns", []),
        lambda lines: _without(lines, "job"),
        lambda lines: _without(lines, "session"),
        lambda lines: _without(lines, "environment"),
        lambda lines: _changed(lines, "config", key="0" * 64),
        lambda lines: _changed(lines, "config", json=from_driver(LAYER).json_text()),
        lambda lines: _changed(lines, "config", json="{}"),
        lambda lines: _changed(lines, "config", json='{"kind":"of nobody"}'),
        lambda lines: _changed(lines, "environment", key="0" * 16),
        lambda lines: _changed(lines, "environment", library_version="9.9"),
    ],
    ids=range(27),
)
def test_a_forged_file_leaves_nothing(
    sqlite_engine: sa.Engine, tmp_path: Path, whole: bytes, forge: Any
) -> None:
    """With a hash that is right."""
    path = tmp_path / "file"
    path.write_bytes(whole)
    lines = contents(path)
    forge(lines)
    before = counts(sqlite_engine)
    with pytest.raises(BadInput):
        restore(sqlite_engine, rewritten(path, lines))
    assert counts(sqlite_engine) == before


def test_what_a_layer_determines_is_computed_whatever_the_file_says(
    engine: sa.Engine, tmp_path: Path, whole: bytes
) -> None:
    """Older versions had other keys of MIOpen's, and wrote the typed columns."""
    path = tmp_path / "file"
    path.write_bytes(whole)
    lines = contents(path)
    names = lines[0][1]["columns"]
    stranger = from_driver(LAYER)
    texts = {"driver": stranger.text(), "label": stranger.label, "kind": "gemm"}
    _changed(lines, "config", **texts, problem_key=text_of(stranger))
    _changed(lines, "environment", machine_key="0" * 16)
    place, config = next((i, row) for i, (name, row) in enumerate(lines) if name == "config")
    typed = {**stranger.to_json(), "config_id": config[0]}
    lines.insert(place + 1, ["conv_config", [typed[name] for name in names["conv_config"]]])
    restore(engine, rewritten(path, lines))
    with reading(engine) as connection:
        for row in connection.execute(sa.select(ConfigRow.__table__)).mappings().all():
            layer = from_json_text(row["json"])
            computed = configs.computed_columns(layer)
            assert {name: row[name] for name in computed} == computed
            if isinstance(layer, ConvConfig):
                in_h = sa.select(ConvConfigRow.in_h).where(ConvConfigRow.config_id == row["id"])
                assert connection.execute(in_h).scalar_one() == layer.in_h
        keys = connection.execute(sa.select(EnvironmentRow.key, EnvironmentRow.machine_key)).all()
        assert [row.key for row in keys] == [row.machine_key for row in keys]


def test_a_file_of_an_older_schema_gets_the_defaults_of_newer_columns(
    sqlite_engine: sa.Engine, tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole)
    lines = contents(path)
    place = lines[0][1]["columns"]["job"].index("uncharged")
    lines[0][1]["columns"]["job"].pop(place)
    for name, row in lines:
        if name == "job":
            row.pop(place)
    found = restore(sqlite_engine, rewritten(path, lines))
    query = sa.select(Job.uncharged).where(Job.session_id == found.session_id).distinct()
    assert read_column(sqlite_engine, query) == [0]


def test_a_file_of_a_schema_without_a_table_of_searches_is_refused(
    sqlite_engine: sa.Engine, tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole)
    lines = contents(path)
    lines[0][1]["schema"] = "0031"
    columns = lines[0][1]["columns"]
    del columns["search"]
    columns["session"][columns["session"].index("options")] = "priority"
    with pytest.raises(BadInput, match="no column priority") as refused:
        restore(sqlite_engine, rewritten(path, lines))
    assert "schema 0031 wrote it" in refused.value.hint


def test_what_cannot_be_archived_leaves_no_file(source: sa.Engine, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        archive(source, 99, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_the_archive_is_of_one_moment(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is written while it is made."""
    session_id = make_jobs(engine, 120)
    seen: list[tuple[int, int]] = []

    def meanwhile(done: int, total: int) -> None:
        if not seen:
            execute(engine, sa.update(Job).values(state="canceled"))
        seen.append((done, total))

    archive(engine, session_id, tmp_path / "file", meanwhile)
    assert seen == [(500, 1200), (1000, 1200), (1200, 1200)]
    verify(tmp_path / "file")
    names = contents(tmp_path / "file")[0][1]["columns"]["job"]
    jobs = [
        dict(zip(names, row, strict=True))
        for name, row in contents(tmp_path / "file")
        if name == "job"
    ]
    assert {job["state"] for job in jobs} == {"new"}


def test_memory_does_not_grow_with_the_session(sqlite_engine: sa.Engine, tmp_path: Path) -> None:
    def peak(layers: int) -> int:
        session_id = (
            make_jobs(sqlite_engine, layers) if layers == 50 else _more(sqlite_engine, layers)
        )
        tracemalloc.start()
        archive(sqlite_engine, session_id, tmp_path / str(layers))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # Eight times the rows would take eight times the memory; when garbage is collected changes a
    # peak by up to half.
    small, large = peak(50), peak(400)
    assert large < 3 * small


def _more(engine: sa.Engine, layers: int) -> int:
    """The jobs of the library's session for more layers."""
    with writing(engine) as connection:
        connection.execute(sa.delete(Job))
        connection.execute(sa.delete(Session))
    return make_jobs(engine, layers)

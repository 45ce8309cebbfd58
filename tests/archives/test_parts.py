"""An archive at a URL, in parts: goes on where it was killed, is refused by name where a part is
not what it was; trials are pruned only with a whole one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import sqlalchemy as sa
from queries import execute, read_value

from tuna import api
from tuna.api import sessions as of_api
from tuna.archives import parts
from tuna.archives.archive import archive
from tuna.artifacts.files import Folder
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job, TrialRow
from tuna.errors import BadInput, ServiceError
from tuna.settings import get_settings

URL = "memory://bucket/one"
SESSION, OTHER = 2, 3


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, source: sa.Engine, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TUNA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(parts, "_MIN_BYTES", 1000)
    monkeypatch.setattr(of_api, "open_database", lambda: source)
    with writing(source) as connection:  # whose jobs have ended
        connection.execute(sa.update(Job).values(state="evaluated"))
    yield
    fsspec.filesystem("memory").store.clear()


def part_names(url: str = URL) -> list[str]:
    return sorted(name for name in Folder(url).sizes() if name.endswith(".part"))


def count(engine: sa.Engine) -> int:
    return read_value(engine, sa.select(sa.func.count()).select_from(TrialRow))


def test_what_is_restored_from_a_url_is_what_was_archived(
    source: sa.Engine,
    sqlite_engine: sa.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header, took = api.archive_session(SESSION, URL)
    assert took.size_bytes == took.sent_bytes
    assert len(part_names()) > 3
    assert api.archive_session(SESSION, URL)[1].sent_bytes == 0
    monkeypatch.setattr(of_api, "open_database", lambda: sqlite_engine)
    assert api.restore_session(URL).jobs == header.jobs
    for engine, name in ((source, "first"), (sqlite_engine, "again")):
        archive(engine, SESSION, tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
    assert not list(get_settings().home.glob("archive-*"))
    with pytest.raises(BadInput, match="is here already") as refused:
        api.restore_session(URL)
    assert URL in str(refused.value) + refused.value.hint


def test_an_archive_whose_writer_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Folder.write, list[str]()

    def dies(folder: Folder, name: str, data: bytes) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(name)
        write(folder, name, data)

    monkeypatch.setattr(Folder, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        api.archive_session(SESSION, URL)
    with pytest.raises(BadInput, match=r"index\.json, which is written last"):
        api.restore_session(URL)
    first, second = part_names()
    monkeypatch.setattr(Folder, "write", write)
    Folder(URL).write(second, b"x" * Folder(URL).sizes()[second])  # as long as it was
    took = api.archive_session(SESSION, URL)[1]
    assert took.size_bytes - took.sent_bytes == Folder(URL).sizes()[first]
    api.prune_session(SESSION, 1000, URL)


def test_parts_of_an_earlier_archive_end_with_its_index(source: sa.Engine) -> None:
    api.archive_session(SESSION, URL)
    before = part_names()
    execute(source, sa.update(Job).where(Job.session_id == SESSION).values(reason="again"))
    api.archive_session(SESSION, URL)
    index = json.loads(Folder(URL).read(parts.INDEX))
    assert part_names() == sorted(index["parts"]) != before


def _missing(folder: Folder, name: str) -> str:
    folder.remove([name])
    return f"{name} is missing"


def _changed(folder: Folder, name: str) -> str:
    data = folder.read(name)
    folder.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    return f"{name} has other bytes than its name says"


def _of_another(folder: Folder, name: str) -> str:
    api.archive_session(OTHER, "memory://bucket/other")
    stranger = part_names("memory://bucket/other")[0]
    folder.write(stranger, Folder("memory://bucket/other").read(stranger))
    index = json.loads(folder.read(parts.INDEX))
    index["parts"][index["parts"].index(name)] = stranger
    folder.write(parts.INDEX, json.dumps(index).encode())
    return f"{stranger} is not part 1 of session"


@pytest.mark.parametrize("spoil", [_missing, _changed, _of_another])
def test_a_part_that_is_not_as_it_was_is_named_and_nothing_is_pruned(
    source: sa.Engine, sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, spoil: object
) -> None:
    api.archive_session(SESSION, URL)
    said = spoil(Folder(URL), part_names()[1])  # type: ignore[operator]
    before = count(source)
    with pytest.raises(BadInput, match=said):
        api.prune_session(SESSION, 1, URL)
    assert count(source) == before
    monkeypatch.setattr(of_api, "open_database", lambda: sqlite_engine)
    with pytest.raises(BadInput, match=said):
        api.restore_session(URL)
    assert count(sqlite_engine) == 0


def test_another_session_is_refused(tmp_path: Path) -> None:
    api.archive_session(SESSION, URL)
    api.archive_session(SESSION, tmp_path / "file")
    for refused in (
        lambda: api.archive_session(OTHER, URL),
        lambda: api.prune_session(OTHER, 1, URL),
        lambda: api.prune_session(OTHER, 1, tmp_path / "file"),
    ):
        with pytest.raises(BadInput, match="another session"):
            refused()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"session": "a", "parts": ["../../x"]}'])
def test_a_bad_index_is_refused(text: str) -> None:
    Folder(URL).write(parts.INDEX, text.encode())
    for refused in (lambda: api.restore_session(URL), lambda: api.archive_session(SESSION, URL)):
        with pytest.raises(BadInput, match="is not an index of an archive"):
            refused()


def test_a_url_without_its_package_says_what_to_install() -> None:
    with pytest.raises(ServiceError, match="Protocol not known"):
        api.restore_session("nothing://user:secret@there")
    with pytest.raises(ServiceError) as raised:
        api.archive_session(SESSION, "nothing://user:secret@there")
    assert "secret" not in str(raised.value)


@pytest.fixture()
def finished(source: sa.Engine) -> sa.Engine:
    """The session with all jobs ended, and a job with many good trials and failures."""
    with writing(source) as connection:
        jobs = sa.select(Job.id).where(Job.session_id == SESSION)
        result = connection.execute(
            sa.select(FindDb.job_id, FindDb.trial_number).where(
                FindDb.job_id.in_(jobs), FindDb.trial_number.is_not(None)
            )
        ).first()
        assert result is not None
        trials = [
            {"number": number, "time_ms": 2000.0 + number, "cause": None}
            for number in range(1000, 1040)
        ]
        trials += [
            {"number": number, "time_ms": None, "cause": cause}
            for number, cause in enumerate(["build_error", "run_error"] * 10, 2000)
        ]
        rest = {"job_id": result.job_id, "output_tail": "", "step": "measure", "times_ms": "[]"}
        connection.execute(sa.insert(TrialRow), [{**rest, **one, "params": "{}"} for one in trials])
        # the result is the slowest of all, as after finals
        of_result = (TrialRow.job_id == result.job_id, TrialRow.number == result.trial_number)
        connection.execute(sa.update(TrialRow).where(*of_result).values(time_ms=9000.0))
    return source


@pytest.mark.parametrize("place", [URL, "file"])
def test_pruning_keeps_what_results_need(
    finished: sa.Engine,
    sqlite_engine: sa.Engine,
    tmp_path: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = URL if place == URL else str(tmp_path / place)
    api.archive_session(SESSION, where)
    before = count(finished)
    done = api.prune_session(SESSION, 5, where)
    assert done.deleted
    assert count(finished) == before - done.deleted
    with reading(finished) as connection:
        lost = sa.select(FindDb.id).where(
            FindDb.session_id == SESSION,
            FindDb.job_id.is_not(None),
            FindDb.trial_number.is_not(None),
            ~sa.exists().where(
                TrialRow.job_id == FindDb.job_id, TrialRow.number == FindDb.trial_number
            ),
        )
        assert not connection.execute(lost).all()
        left = sa.select(TrialRow.number).where(TrialRow.number >= 1000)
        numbers = set(connection.execute(left).scalars())
        per_solver = (
            sa.select(sa.func.count())
            .select_from(TrialRow)
            .join(Job)
            .where(Job.session_id == SESSION, TrialRow.cause.is_(None))
            .group_by(Job.config_id, Job.solver_id)
        )
        assert max(connection.execute(per_solver).scalars()) <= 6  # the fastest and the result
    assert {2000, 2018, 2019} >= {one for one in numbers if one >= 2000} >= {2018, 2019}
    # again, as after a kill: what was deleted is in the archive
    assert api.prune_session(SESSION, 5, where).deleted == 0
    assert api.prune_session(SESSION, 1, where).deleted
    if place == URL:
        with pytest.raises(BadInput, match="are left here"):
            api.archive_session(SESSION, URL)
    monkeypatch.setattr(of_api, "open_database", lambda: sqlite_engine)
    api.restore_session(where)
    assert count(sqlite_engine) >= before - count(finished)


def test_only_what_the_archive_has_is_pruned(finished: sa.Engine) -> None:
    api.archive_session(SESSION, URL)
    execute(finished, sa.update(TrialRow).where(TrialRow.number == 1003).values(params="{1}"))
    before = count(finished)
    with pytest.raises(BadInput, match="rows of table trial differ"):
        api.prune_session(SESSION, 5, URL)
    execute(finished, sa.update(Job).where(Job.session_id == SESSION).values(state="new"))
    with pytest.raises(BadInput, match="has open jobs"):
        api.prune_session(SESSION, 5, URL)
    assert count(finished) == before


def test_a_uuid_that_is_a_path_names_no_file(source: sa.Engine, tmp_path: Path) -> None:
    """A version that took any may have restored it."""
    header = archive(source, SESSION, tmp_path / "file")
    url, before = (tmp_path / "there" / "inside").as_uri(), sorted(tmp_path.iterdir())
    for name in ("../../outside", "a/b", ""):
        with pytest.raises(BadInput, match="would name files"):
            parts.send(tmp_path / "file", url, replace(header, uuid=name), 0)
    assert sorted(tmp_path.iterdir()) == before

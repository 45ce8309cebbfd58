"""The earlier searches that a search learns from: which are chosen, that they stay the same, and
who sees it; on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DatabaseBuilder
from jobs_builder import claim
from queries import execute

from tuna.archives import removal
from tuna.archives.archive import archive
from tuna.archives.restore import restore
from tuna.artifacts.store import Artifacts
from tuna.configs import Config, ConvConfig, TaskConfig
from tuna.coordinator import staging
from tuna.db import models, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job, KernelRow, TrialRow, WarmStartRow
from tuna.jobs import failures, history
from tuna.libraries.items import WorkItem
from tuna.libraries.registry import get_library

pytestmark = pytest.mark.both_databases_in_drills

LAYER = ConvConfig(1, 64, 28, 28, 64, 3, 3, 1, 1)
STEPS = {"steps": "search,compile,eval"}
SOLVER = "TvmConvDirectNCHW"
LIBRARY = get_library("tvm")


class Room:
    """A database with searches, of which one is to be opened."""

    def __init__(self, engine: sa.Engine, folder: Path) -> None:
        self.engine = engine
        self.store = Artifacts((folder / "store").as_uri(), folder / "copies")
        self.folder = folder
        with writing(engine) as connection:
            self.session_id = DatabaseBuilder(connection).session(reason="new")

    def session(self, *, environment_of: int | None = None, **fields: Any) -> int:
        """Another one: in the environment of `environment_of`, or in one of its own."""
        with writing(self.engine) as connection:
            build = DatabaseBuilder(connection)
            if environment_of is None:
                return build.session(**fields)
            same = sa.select(models.Session.environment_id).where(
                models.Session.id == environment_of
            )
            environment_id = connection.execute(same).scalar_one()
            facts = {"reason": fields["reason"], "created_at": build.clock}
            return int(build.insert(models.Session, environment_id=environment_id, **facts))

    def search(
        self,
        session_id: int,
        layer: Config = LAYER,
        times: Sequence[float | None] = tuple(1.0 + number for number in range(10)),
        *,
        solver: str = SOLVER,
        stopped: str | None = "all trials are done",
        **result: Any,
    ) -> int:
        """An ended search of one round; returns its first job."""
        with writing(self.engine) as connection:
            build = DatabaseBuilder(connection)
            found = connection.execute(
                sa.select(models.SolverRow.id).where(models.SolverRow.name == solver)
            ).scalar()
            solver_id = found or build.solver(solver)
            bodied = {layer.body_digest: b"text"} if layer.body_digest else {}
            if bodied:
                connection.execute(
                    sa.insert(KernelRow).prefix_with(
                        "OR IGNORE" if self.engine.dialect.name == "sqlite" else "IGNORE"
                    ),
                    [
                        {"digest": digest, "blob": blob, "size_bytes": 4}
                        for digest, blob in bodied.items()
                    ],
                )
            config_id = build.config(layer)
            job = build.job(session_id, config_id, solver_id, stopped=stopped, attempt=3, **STEPS)
            for number, time_ms in enumerate(times):
                cause = {"cause": "run_error"} if time_ms is None else {}
                build.trial(job, number, time_ms, params=f"{job}/{number}", step="eval", **cause)
            good = [time_ms for time_ms in times if time_ms is not None]
            build.winner(
                session_id, config_id, solver_id, min(good, default=1.0), job=job, **result
            )
        return job

    def open(self, layer: Config = LAYER, **fields: Any) -> int:
        """A search that is to begin."""
        with writing(self.engine) as connection:
            build = DatabaseBuilder(connection)
            found = connection.execute(
                sa.select(models.SolverRow.id).where(models.SolverRow.name == SOLVER)
            ).scalar()
            facts = {"state": "new", "step": "search", **STEPS, **fields}
            return build.job(
                self.session_id, build.config(layer), found or build.solver(SOLVER), **facts
            )

    def claim(self) -> WorkItem:
        """The round that waits longest."""
        (chunk,) = claim(self.engine, self.session_id, "search", 1, 1, library=LIBRARY)
        staging.stage_artifacts(self.engine, self.store, chunk.items)
        return chunk.items[0]

    def learned(self, item: WorkItem) -> list[list[dict[str, Any]]]:
        return history.read([self.store.get(one.artifact) for one in item.siblings])

    def labels(self, item: WorkItem) -> list[str]:
        return [one.label for one in item.siblings]


@pytest.fixture()
def room(engine: sa.Engine, tmp_path: Path) -> Room:
    return Room(engine, tmp_path)


def test_the_same_layer_comes_first_then_the_nearest_sizes_then_other_devices(room: Room) -> None:
    earlier = room.session(environment_of=room.session_id, reason="earlier")
    other = room.session(arch="znver4", device="EPYC 7763", reason="other device")
    old = room.session(arch="znver3", library_version="0.1", reason="another version")
    far, near = replace(LAYER, in_channels=256), replace(LAYER, in_channels=128)
    for session_id, layer in (
        (other, near),
        (other, LAYER),
        (old, LAYER),
        (earlier, far),
        (room.session_id, near),
    ):
        room.search(session_id, layer)
    room.search(earlier)
    room.search(earlier, replace(LAYER, fil_h=5), times=[1.0] * 10)
    room.open()
    item = room.claim()
    label = LAYER.label
    assert room.labels(item) == [
        f"{label} in session {earlier}",
        f"{near.label} in session {room.session_id}",
        f"{far.label} in session {earlier}",
        f"{label} in session {other} on EPYC 7763",
        f"{near.label} in session {other} on EPYC 7763",
    ]
    assert [one.same for one in item.siblings] == [True, False, False, False, False]
    with reading(room.engine) as connection:
        (found,) = history.warm_starts_of_session(connection, room.session_id)
    assert [one.origin for one in found.siblings] == [
        "session",
        "config",
        "config",
        "device",
        "device",
    ]
    assert (found.layer, found.solver) == (label, SOLVER)


def test_what_tells_nothing_of_devices_or_too_little_is_left_out(room: Room) -> None:
    earlier = room.session(environment_of=room.session_id, reason="earlier")
    for number, facts in enumerate(
        (
            {"simulated": True},
            {"solver": "TvmConvNCHWc"},
            {"times": [1.0] * 7 + [None] * 9},
        )
    ):
        room.search(earlier, replace(LAYER, in_channels=32 * (number + 2)), **facts)  # type: ignore[arg-type]
    room.open()
    assert room.claim().siblings == ()


def test_a_noisy_search_of_the_same_layer_comes_after_quiet_ones_and_its_times_are_not_ours(
    room: Room,
) -> None:
    for reason, noisy in (("quiet", False), ("noisy", True)):
        room.search(room.session(environment_of=room.session_id, reason=reason), noisy=noisy)
    room.open()
    assert [one.same for one in room.claim().siblings] == [True, False]


def test_functions_without_a_core_learn_from_those_of_their_name(room: Room) -> None:
    task = TaskConfig(name="softmax", body="a" * 64, structure="1")
    room.search(room.session_id, replace(task, body="b" * 64, structure="2"))
    room.search(room.session_id, replace(task, name="add", body="c" * 64, structure="3"))
    row = {"digest": "a" * 64, "blob": b"text", "size_bytes": 4}
    execute(room.engine, sa.insert(KernelRow).values(**row))
    room.open(task)
    assert [one.split()[:2] for one in room.labels(room.claim())] == [["task", "softmax"]]


def test_a_warm_start_is_bounded_and_has_fast_slow_and_failed_trials(room: Room) -> None:
    times: list[float | None] = [float(number + 1) for number in range(200)]
    for number in range(10):
        room.search(
            room.session_id, replace(LAYER, in_channels=65 + number), times=[*times, *[None] * 30]
        )
    room.open()
    item = room.claim()
    assert len(item.siblings) == history.MAX_SEARCHES
    for block in room.learned(item):
        found = sorted(trial["time_ms"] for trial in block if trial["time_ms"])
        assert found[:32] == times[:32]
        assert len(found) <= 64
        assert found[-1] > 190
        assert sum(trial["cause"] == "run_error" for trial in block) == 16


def test_all_rounds_learn_from_the_same_whatever_happens_to_the_others(room: Room) -> None:
    """A choice that depended on what has ended when a round is opened would change the trials with
    every delay."""
    earlier = room.session(environment_of=room.session_id, reason="earlier")
    room.search(earlier)
    job_id = room.open()
    first = room.claim()
    before = room.learned(first)
    assert len(before) == 1
    with writing(room.engine) as connection:
        chunk = connection.execute(sa.select(Job.chunk).where(Job.id == job_id)).scalar_one()
        failures.release(connection, [chunk], max_attempts=5, worker_lost=True)
        connection.execute(sa.update(Job).values(ready_at=None))
        connection.execute(sa.update(TrialRow).values(time_ms=TrialRow.time_ms * 2))
    room.search(room.session_id, replace(LAYER, in_channels=128))
    removal.delete(room.engine, earlier, lambda _: None)
    for one in first.siblings:
        for path in room.folder.rglob(f"*{one.artifact}*"):
            path.unlink()
    again = room.claim()
    assert again.attempt == first.attempt + 1
    assert again.siblings == first.siblings
    assert room.learned(again) == before
    with writing(room.engine) as connection:
        row = dict(
            connection.execute(sa.select(Job.__table__).where(Job.id == job_id)).mappings().one()
        )
        facts = {
            "round": 1,
            "state": "new",
            "step": "search",
            "attempt": 0,
            "chunk": None,
            "leased_at": None,
        }
        connection.execute(sa.insert(Job).values({**row, **facts, "id": None}))
    later = room.claim()
    assert (later.round, later.siblings) == (1, first.siblings)


def test_searches_that_go_on_beside_each_other_learn_from_each_other(room: Room) -> None:
    """A search chooses again when it has results of its own, and others have some too."""
    layers = [replace(LAYER, batchsize=size) for size in (1, 2, 4, 8, 64)]
    first, *others = layers
    wider, later = replace(LAYER, in_channels=65), replace(LAYER, batchsize=100)
    job_id = room.open(first)
    assert room.claim().siblings == ()
    for layer in (wider, *others[::-1]):
        room.search(room.session_id, layer, stopped=None)
    siblings = []
    for number in (1, 2, 3):
        with writing(room.engine) as connection:
            facts = {"round": number, "state": "new", "step": "search", "attempt": 0, "chunk": None}
            old = sa.select(Job.__table__).where(Job.id == job_id)
            row = connection.execute(old).mappings().one()
            connection.execute(sa.insert(Job).values({**row, **facts, "id": None}))
        siblings.append(room.claim().siblings)
        room.search(room.session_id, replace(later, batchsize=99 + number), stopped=None)
    assert siblings[0] == ()
    assert siblings[1] == siblings[2], "there is no third choice"
    assert [one.label for one in siblings[1]] == [
        f"{layer.label} in session {room.session_id}" for layer in (*others, later, wider)
    ]
    with reading(room.engine) as connection:
        (found,) = history.warm_starts_of_session(connection, room.session_id)
    assert [one.label for one in found.siblings] == [one.label for one in siblings[1]]


def test_a_search_that_began_without_siblings_goes_on_without(room: Room) -> None:
    job_id = room.open()
    assert room.claim().siblings == ()
    room.search(room.session_id, replace(LAYER, in_channels=128))
    execute(room.engine, sa.update(Job).where(Job.id == job_id).values(state="new", chunk=None))
    assert room.claim().siblings == ()


@pytest.mark.parametrize("options", [{"warm_start": False}, {}])
def test_an_option_leaves_warm_starts_out(room: Room, options: dict[str, Any]) -> None:
    room.search(room.session_id, replace(LAYER, in_channels=128))
    room.open(options=options)
    assert len(room.claim().siblings) == (0 if options else 1)


def test_an_archived_search_keeps_what_it_learns_from_and_a_deleted_one_frees_it(
    room: Room,
) -> None:
    earlier = room.session(environment_of=room.session_id, reason="earlier")
    room.search(earlier)
    room.open()
    before = room.learned(room.claim())
    with writing(room.engine) as connection:
        (row,) = connection.execute(sa.select(models.EnvironmentRow.__table__)).mappings()
        key = sessions.environment_of(dict(row)).key
        connection.execute(sa.update(models.EnvironmentRow).values(key=key))
    archive(room.engine, room.session_id, room.folder / "file")
    execute(room.engine, sa.update(Job).values(state="canceled"))
    assert _blocks(room) == (1, 1)
    for session_id in (room.session_id, earlier):
        removal.delete(room.engine, session_id, lambda _: None)
    assert _blocks(room) == (0, 0)
    restored = restore(room.engine, room.folder / "file")
    with reading(room.engine) as connection:
        (found,) = history.warm_starts_of_session(connection, restored.session_id)
        (blob,) = connection.execute(sa.select(KernelRow.blob)).scalars()
    assert [one.origin for one in found.siblings] == ["session"]
    assert history.read([blob]) == before


def _blocks(room: Room) -> tuple[int, int]:
    with reading(room.engine) as connection:
        counts = [
            connection.execute(sa.select(sa.func.count()).select_from(of)).scalar_one()
            for of in (WarmStartRow, KernelRow)
        ]
    return counts[0], counts[1]


def test_a_search_learns_nothing_from_itself(room: Room) -> None:
    room.search(room.session_id)
    with writing(room.engine) as connection:
        connection.execute(sa.update(Job).values(state="new", step="search", attempt=0))
        assert connection.execute(sa.select(sa.func.count()).select_from(FindDb)).scalar_one() == 1
    assert room.claim().siblings == ()


def test_a_remote_worker_may_read_the_trials_that_a_search_learns_from(room: Room) -> None:
    """A first round has no other artifact: without them it was given up as one whose artifacts are
    lost."""
    room.search(room.session_id, replace(LAYER, in_channels=128))
    room.open()
    item = room.claim()
    assert item.artifacts == {one.artifact for one in item.siblings} != set()


def test_a_trained_predictor_in_use_goes_with_the_siblings(room: Room) -> None:
    earlier = room.session(environment_of=room.session_id, reason="earlier")
    room.search(earlier)
    with writing(room.engine) as connection:
        build = DatabaseBuilder(connection)
        facts = {"library": "tvm", "seed": 0, "library_version": "1", "seen": "", "layers": 9}
        for name, arch, used in (
            ("tvm-1", "gfx942", True),
            ("tvm-2", LIBRARY.environment().arch, True),
            ("tvm-3", "", False),
        ):
            model = build.kernel(name.encode())
            facts |= {"arch": arch, "trials": 99, "model": model, "tables": model}
            facts |= {"name": name, "in_searches": used, "evaluation": "{}"}
            connection.execute(sa.insert(models.PredictorRow).values(facts))
    room.open()
    item = room.claim()
    assert [one.prior for one in item.siblings] == [False, True]
    assert room.labels(item)[1] == "tvm-2"
    assert room.store.get(item.siblings[1].artifact) == b"tvm-2"

"""Random writes of a member, within its own rights, neither end nor slow a coordinator, nor change
anything of others."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import redis
import sqlalchemy as sa
from guarded_redis import ADMIN, guarded_redis
from hypothesis import strategies as st
from jobs_builder import accepted
from member_double import MemberDouble, good
from member_site import Site, servers
from shared_data import DRILLS

from tuna.db.engine import make_engine, reading
from tuna.db.models import StepResult
from tuna.libraries.items import Trial
from tuna.membership import conduct
from tuna.queue import keys
from tuna.queue.chunk_size import ChunkSizer
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.settings import get_settings
from tuna.testing.servers import with_password

WRITES = 100 if DRILLS == 1 else 2000
#: Between two turns of the coordinator.
EACH = 10

_deep = st.sampled_from(("[", '{"a":', "[{}, ")).flatmap(
    lambda part: st.integers(1, 20_000).map(lambda n: part * n)
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=10,
).map(json.dumps)
_value = st.one_of(
    st.binary(max_size=50),
    st.text(max_size=50).map(lambda t: t.encode(errors="replace")),
    _json,
    _deep,
)
_any_id = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)).map(
    lambda pair: f"{pair[0]}-{pair[1]}"
)
_rare_id = _any_id | st.just(f"{2**64 - 1}-{2**64 - 1}")
# after a large one comes none
_id = st.integers(0, 15).flatmap(lambda number: st.just("*") if number else _rare_id)
_names = [key.removeprefix(keys.prefix("n", "m")) for key in keys.all_keys("n", "m")]
_name = st.sampled_from(_names)


@st.composite
def _forged(draw: st.DrawFn, chunk: Chunk) -> bytes:
    """A report that is almost good: of a chunk that was dealt, with some of its fields replaced."""
    results = [good(item, trials=(Trial(index=0, params="{}", artifact=draw(st.sampled_from((None, "0" * 64, "x")))),))
               for item in chunk.items * draw(st.integers(0, 3))]  # fmt: skip
    report = json.loads(
        Report(
            kind=draw(st.sampled_from(ReportKind)),
            chunk=chunk.id,
            worker="w:1",
            results=tuple(results),
        ).to_json()
    )
    for name in draw(st.lists(st.sampled_from((*report, "extra")), max_size=2)):
        report[name] = draw(
            st.none() | st.integers() | st.text(max_size=30) | st.just("x" * 300_000)
        )
    if report.get("results") and isinstance(report["results"], list):
        result = draw(st.sampled_from(report["results"]))
        for name in draw(st.lists(st.sampled_from(sorted(result)), max_size=2)):
            result[name] = draw(st.none() | st.integers() | st.floats() | st.text(max_size=30))
    return json.dumps(report).encode(errors="replace")


@st.composite
def _heartbeat(draw: st.DrawFn) -> bytes:
    fields: dict[str, Any] = {
        "host": "h",
        "pid": 7,
        "started_at": 1.0,
        "toolchains": ["x"],
        "job_ids": [1],
        "aside": "",
    }
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        fields[name] = draw(
            st.none() | st.integers() | st.floats() | st.text(max_size=30) | st.just("x" * 10_000)
        )
    return json.dumps(fields).encode(errors="replace")


def _writes(chunk: Chunk) -> st.SearchStrategy[tuple[Any, ...]]:
    """Commands of a member, with the names of its keys."""
    number = st.integers(0, 40).map(str)
    return st.one_of(
        st.tuples(st.just("HSET"), _name, _value, _value),
        st.tuples(st.just("XADD"), _name, _id, _value, _value),
        st.tuples(st.just("LPUSH"), _name, _value),
        st.tuples(st.just("SADD"), _name, _value),
        st.tuples(st.just("HDEL"), _name, st.sampled_from((chunk.id, "7"))),
        st.tuples(st.just("HSET"), st.just("heartbeats"), number, _heartbeat()),
        st.tuples(st.just("HSET"), st.just("artifacts"), st.just(f"{chunk.id}/{'0' * 64}"), _value),
        st.tuples(st.just("HSET"), st.just("dealt"), st.just(chunk.id), _value),
        st.tuples(st.just("XADD"), st.just("reports"), _id, st.just("r"), _forged(chunk)),
    )


@pytest.fixture(params=servers())
def make_site(
    request: pytest.FixtureRequest, tuna_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Site]]:
    """`make_site(layers)`: a session with ten jobs for each layer."""
    with guarded_redis(request.param) as url:
        monkeypatch.setenv("TUNA_BROKER_URL", with_password(url, ADMIN))
        get_settings.cache_clear()
        with contextlib.ExitStack() as stack:

            def make(layers: int) -> Site:
                engine = make_engine(get_settings().sql_url)
                stack.callback(engine.dispose)
                made = Site(
                    engine, redis.Redis.from_url(with_password(url, ADMIN)), url, tmp_path, layers
                )
                stack.callback(made.coordinator._members.close)
                stack.callback(made.own.close)
                return made

            yield make


@pytest.fixture()
def site(make_site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch) -> Site:
    """One whose members may write what they want, and stay."""
    monkeypatch.setattr(ChunkSizer, "chunk", lambda *_: 5)
    monkeypatch.setattr(conduct, "CORDON_AFTER", 10**9)
    monkeypatch.setattr(conduct, "REVOKE_AFTER", 10**9)
    return make_site(4)


def write(member: MemberDouble, words: tuple[Any, ...]) -> None:
    """One command; that it may fail is the member's own affair."""
    with member.client.pipeline(transaction=False) as pipe:
        pipe.execute_command(words[0], member.key(words[1]), *words[2:])
        (answer,) = pipe.execute(raise_on_error=False)
    assert "NOPERM" not in str(answer), "a right that it has"


def some_writes(chunk: Chunk, number: int) -> list[tuple[Any, ...]]:
    """Random commands of a member."""
    found: list[tuple[Any, ...]] = []

    @hypothesis.settings(
        max_examples=number, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(_writes(chunk))
    def draw(words: tuple[Any, ...]) -> None:
        found.append(words)

    draw()
    return found


def test_random_writes_have_no_effect(site: Site) -> None:
    hostile = site.join()
    site.turn()
    chunk = hostile.next_chunk()
    assert chunk is not None
    for number, words in enumerate(some_writes(chunk, WRITES)):
        write(hostile, words)
        if number % EACH == 0:
            site.turn()
            site.client.delete(hostile.key("reports"))  # a stream with the largest id takes no more
    site.turn()
    assert site.faults() > 0
    site.revoke(hostile)
    site.finish(seconds=60)
    assert site.is_gone(hostile)
    assert {count for *_, count in accepted(site.engine)} == {1}
    with reading(site.engine) as connection:
        names = set(connection.execute(sa.select(StepResult.worker).distinct()).scalars())
    assert {name.partition(":")[0] for name in names} <= {"", "own", hostile.name}


@pytest.mark.drill(only=True)
def test_two_thousand_jobs_end_once_beside_hostile_members(
    make_site: Callable[[int], Site],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One hostile member after the other writes at random until it is revoked."""
    monkeypatch.setattr(ChunkSizer, "chunk", lambda *_: 20)
    site = make_site(200)
    honest, hostile = (site.join("compile"), site.join("eval")), site.join()
    site.turn()
    chunk = hostile.next_chunk()
    assert chunk is not None
    writes = itertools.cycle(some_writes(chunk, 500))
    others, revoked_s = 0, []
    while not site.is_done():
        site.turn()
        for worker in honest:
            worker.beat()
            worker.work()
        if mine := site.own.next_chunk():
            site.own.run(mine)
        if site.state(hostile.name) == "revoked":
            began = time.monotonic()
            while not site.is_gone(hostile):
                site.coordinator._gate.tick()
            revoked_s.append(time.monotonic() - began)
            hostile, others = site.join(), others + 1
        for words in itertools.islice(writes, 5):
            write(hostile, words)
    with capsys.disabled():
        print(
            f"\n{others} hostile members, gone within {max(revoked_s):.2f} s;"
            f" {len(site.failures())} failures"
        )
    assert others > 3
    assert site.each_once()
    assert {cause for cause, _ in site.failures()} <= {"worker_lost", "infra", "artifact_lost"}
    assert max(revoked_s) < 2


def _endless_good(member: MemberDouble, chunk: Chunk) -> Iterator[tuple[Any, ...]]:
    """What breaks no rule, or not at once: heartbeats that change, and reports, large ones too,
    about its chunk."""
    report = Report(
        kind=ReportKind.STARTED, chunk=chunk.id, worker="w:1", reason="x" * 200_000
    ).to_json()
    for number in itertools.count():
        facts = {
            "started_at": 1.0,
            "done": number,
            "aside": "x" * 4000,
            "job_ids": list(range(1000)),
        }
        yield "HSET", "heartbeats", str(number % 30), json.dumps(facts)
        yield "XADD", "reports", "*", "r", report


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("kind", ["random", "valid"])
def test_a_coordinator_is_slowed_by_at_most_a_tenth(
    site: Site, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of its time that a coordinator spends with a member that writes all the time and is
    never revoked."""
    hostile = site.join()
    site.turn()
    chunk = hostile.next_chunk()
    assert chunk is not None
    writes = iter(some_writes(chunk, 2000)) if kind == "random" else _endless_good(hostile, chunk)
    quiet = _shares(site, 3.0)
    stop = threading.Event()

    def attack() -> None:
        for number, words in enumerate(writes):
            write(hostile, words)
            if number % 100 == 0:
                # a stream with the largest id takes no more
                site.client.delete(hostile.key("reports"))
            if stop.wait(0.005):
                return

    attacker = threading.Thread(target=attack)
    attacker.start()
    attacked = _shares(site, 10.0)
    stop.set()
    attacker.join()
    with capsys.disabled():
        print(
            f"\n{kind} writes, {site.faults()} of them bad: share of time {quiet.wall:.1%} ->"
            f" {attacked.wall:.1%}"
        )
        print(f"share of a core {quiet.cpu:.1%} -> {attacked.cpu:.1%}")
    assert attacked.cpu - quiet.cpu <= 0.10


class _Shares(NamedTuple):
    cpu: float
    wall: float


def _shares(site: Site, seconds: float) -> _Shares:
    """The shares of rounds of 0.1 s, which are those of a busy coordinator, that members take."""
    members, cpu, wall = site.coordinator._members, 0.0, 0.0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        cpu_at, wall_at = time.thread_time(), time.monotonic()
        members.tick()
        cpu, wall = cpu + time.thread_time() - cpu_at, wall + time.monotonic() - wall_at
        site.coordinator.drain.once()
        time.sleep(max(0.0, 0.1 - (time.monotonic() - wall_at)))
    return _Shares(cpu / seconds, wall / seconds)

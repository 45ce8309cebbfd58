"""What a hostile member does with its real credentials has no effect on others: the attacks of
which the gate was built.

The numbers are those of the attacks that succeeded before a member had keys of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from command_lines import Ended
from guarded_redis import ADMIN, emptied, guarded_redis
from member_double import MemberDouble, good
from member_site import Site, granted, servers

from tuna.db.engine import make_engine, reading
from tuna.db.models import StepResult, Trial
from tuna.libraries.items import Trial as TrialResult
from tuna.membership import conduct, dealer
from tuna.queue import keys
from tuna.queue.announcements import signer_key
from tuna.queue.celery_internals import queue_keys
from tuna.queue.chunk_size import ChunkSizer
from tuna.queue.messages import Report, ReportKind
from tuna.settings import get_settings
from tuna.testing.servers import with_password

LARGEST = "18446744073709551615-18446744073709551615"
NOT_TEXT = b"\xff\xfe\x00\x80"
DEEP = b"[" * 200_000
_COMMANDS = (
    "GET {}", "SET {} x", "DEL {}", "UNLINK {}", "EXPIRE {} 1", "TYPE {}", "DUMP {}", "HGETALL {}", "HGET {} f", "HSET {} f x",
    "HDEL {} f", "XADD {} * r x", f"XADD {{}} {LARGEST} r x", "XADD {} MAXLEN 0 * r x", "XRANGE {} - +", "XTRIM {} MAXLEN 0",
    "ZADD {} 9e15 x", "ZRANGE {} 0 -1", "ZREM {} x", "LPUSH {} x", "BRPOP {} 1", "LRANGE {} 0 -1", "SADD {} x", "SMEMBERS {}",
    "INCRBY {} 1000000000000000", "MEMORY USAGE {}", "OBJECT ENCODING {}", "SUBSCRIBE {}", "PUBLISH {} x",
)  # fmt: skip
_OF_SERVER = (
    "EVAL return(1) 0", "EVALSHA x 0", "SCRIPT LOAD x", "KEYS *", "SCAN 0", "ACL LIST", "CONFIG GET *", "CLIENT LIST",
    "CLIENT KILL ID 1", "CLIENT NO-EVICT on", "MONITOR", "FLUSHALL", "SELECT 1", "SWAPDB 0 1", "DEBUG SLEEP 1", "PSUBSCRIBE *",
    "INFO", "SHUTDOWN", "WAIT 1 0", "RANDOMKEY",
)  # fmt: skip
_SINCE_7 = ("FUNCTION LIST", "FCALL x 0")


@pytest.fixture(scope="module", params=servers())
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with guarded_redis(request.param) as found:
        yield found


@pytest.fixture()
def admin(url: str) -> redis.Redis:
    return emptied(url)


@pytest.fixture()
def site(
    url: str, admin: redis.Redis, tuna_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setenv("TUNA_BROKER_URL", with_password(url, ADMIN))
    for name, value in {
        "LEASE_S": 30,
        "MEMBER_ARTIFACTS_MIB": 4,
        "MEMBER_REPORTS_MIB": 2,
        "MEMBER_REPORTS": 1000,
    }.items():
        monkeypatch.setenv(f"TUNA_{name}", str(value))
    monkeypatch.setattr(ChunkSizer, "chunk", lambda *_: 5)
    get_settings.cache_clear()
    engine = make_engine(get_settings().sql_url)
    made = Site(engine, admin, url, tmp_path, 4)
    yield made
    made.own.close()
    made.coordinator._members.close()
    engine.dispose()


@pytest.fixture()
def hostile(site: Site) -> MemberDouble:
    """A member with two chunks."""
    member = site.join()
    site.turn()
    assert site.client.hlen(member.key("dealt")) == 2
    return member


def as_undisturbed(site: Site, *others: MemberDouble) -> None:
    """All jobs end, exactly once, without the hostile member."""
    site.finish(*others)
    assert site.each_once()


def test_nothing_but_its_own_keys_can_be_read_or_written(site: Site, hostile: MemberDouble) -> None:
    """M1, M2, M4, M5, M8: each began with a key that is not the member's."""
    victim = site.join()
    foreign = [
        site.key(name)
        for name in (
            "results",
            "leases",
            "holders",
            "waiting",
            "workers",
            "dealt",
            "dealt_counts",
            "dealt_past",
        )
    ]
    foreign += [
        site.key(name)
        for name in ("faults", "store", "artifacts", "artifact_sizes", "artifact_bytes")
    ]
    foreign += [
        site.key(f"artifact:{'0' * 64}"),
        site.key(f"worker:{victim.name}:7"),
        signer_key(site.namespace),
    ]
    foreign += [
        *site.own.queues,
        *queue_keys(site.own.queues[0]),
        "unacked",
        "unacked_index",
        "unacked_mutex",
        "tuna:namespaces",
    ]
    foreign += [*keys.all_keys(site.namespace, victim.name), hostile.key("x"), hostile.key("")]
    foreign += [
        "_kombu.binding.celery.pidbox",
        "/0.celeryev/x",
        "celeryev",
        hostile.key("work\n"),
        f"x{hostile.key('work')}",
    ]
    words = [command.format(key).split(" ") for key in foreign for command in _COMMANDS]
    is_new = site.client.info()["redis_version"] >= "7"
    words += [command.split() for command in (*_OF_SERVER, *(_SINCE_7 if is_new else ()))]
    assert granted(hostile.client, words) == []
    assert site.state(hostile.name) == "active"
    site.revoke(hostile)
    as_undisturbed(site, victim)


def test_m1_results_of_others_cannot_be_forged_nor_code_signed(
    site: Site, hostile: MemberDouble
) -> None:
    victims = site.own.next_chunk()
    assert victims is not None
    assert site.leases.take(
        victims.id, "own:1/t", '{"kind":"started","chunk":"c","worker":"own:1"}'
    )
    forged = [good(item) for item in victims.items]
    for kind in (ReportKind.FINISHED, ReportKind.RETURNED, ReportKind.LOST):
        results = () if kind is ReportKind.LOST else forged
        hostile.report(kind, victims.id, results, worker="own:1", place="own")
    mine = hostile.next_chunk()
    assert mine is not None
    code = b"its own code"
    digest = hashlib.sha256(code).hexdigest()
    hostile.put(mine.id, digest, code)
    for key_id in site.coordinator._artifacts.keys.ids:
        hostile.put(mine.id, f"{digest}.{key_id}", b"s" * 64)
    hostile.put(victims.id, digest, code)
    # of jobs of another chunk, under its own chunk's name
    swapped = [good(item) for item in victims.items]
    hostile.report(ReportKind.RESULTS, mine.id, swapped[: len(mine.items)])
    site.turn()
    assert site.faults() == 3, "reports about a chunk of the own worker"
    assert site.state(hostile.name) == "cordoned"
    with reading(site.engine) as connection:
        assert not connection.execute(
            sa.select(sa.func.count()).select_from(StepResult)
        ).scalar_one()
    with pytest.raises(KeyError):
        site.coordinator._artifacts.get(digest)
    assert site.leases.finish(victims.id, "own:1/t", _finished(victims.id, forged)), (
        "the own worker has its lease still"
    )
    site.revoke(hostile)
    as_undisturbed(site)
    with reading(site.engine) as connection:
        assert connection.execute(sa.select(Trial).where(Trial.artifact == digest)).all() == []


def _finished(chunk: str, results: list[Any]) -> str:
    return (
        Report(kind=ReportKind.FINISHED, chunk=chunk, worker="own:1", results=tuple(results))
        .to_json()
        .decode()
    )


def test_m1_an_artifact_of_a_member_counts_only_with_its_chunk_and_its_digest(
    site: Site, hostile: MemberDouble
) -> None:
    mine = hostile.next_chunk()
    assert mine is not None
    digest = hashlib.sha256(b"code").hexdigest()
    hostile.put(mine.id, digest, b"other code")
    trial = TrialResult(index=0, params="{}", artifact=digest)
    hostile.report(
        ReportKind.FINISHED, mine.id, [good(item, trials=(trial,)) for item in mine.items]
    )
    site.turn()
    assert {cause for cause, _ in site.failures()} == {"infra"}
    with pytest.raises(KeyError):
        site.coordinator._artifacts.get(digest)
    site.revoke(hostile)
    as_undisturbed(site)


def test_m2_the_largest_id_of_a_stream_stops_only_its_own(
    site: Site, hostile: MemberDouble
) -> None:
    hostile.client.execute_command("XADD", hostile.key("reports"), LARGEST, "r", "{")
    for _ in range(2):
        site.turn()
    assert site.faults() == 1
    with pytest.raises(redis.ResponseError, match=r"equal or smaller|exhausted"):
        hostile.client.xadd(hostile.key("reports"), {"r": "x"})
    site.revoke(hostile)
    as_undisturbed(site)


UNREADABLE = (
    NOT_TEXT, DEEP, b"", b"null", b'{"done":"x"}', b"\xed\xa0\x80", b'{"a":' * 50_000, b"1e999", b"9" * 100_000, b'"\\ud800"',
)  # fmt: skip


def test_m3_values_that_cannot_be_read_are_deleted_and_counted(
    site: Site, hostile: MemberDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "REVOKE_AFTER", 1000)
    for value in UNREADABLE:
        before = site.faults()
        hostile.beat()
        hostile.client.xadd(hostile.key("reports"), {"r": value})
        hostile.client.xadd(hostile.key("reports"), {value or "y": value, "z": value})
        hostile.client.hset(hostile.key("heartbeats"), "8", value)
        hostile.client.hset(hostile.key("heartbeats"), value or "y", value)
        hostile.client.lpush(hostile.key("work"), value)
        hostile.client.hset(hostile.key("dealt"), value, value)
        hostile.client.hset(hostile.key("artifacts"), value, value)
        site.turn()
        is_large = len(value) > 40_000  # then the heartbeats are deleted unread
        assert site.faults() - before == (3 if is_large else 4)
        assert site.client.xlen(hostile.key("reports")) == 0
        assert site.client.hkeys(hostile.key("heartbeats")) == ([] if is_large else [b"7"])
    assert site.state(hostile.name) == "cordoned"
    as_undisturbed(site)


def test_m3_wrong_types_cordon_and_then_revoke_and_all_commands_still_work(
    site: Site, hostile: MemberDouble, type_in: Callable[..., Ended]
) -> None:
    another = site.join()
    for name in ("reports", "heartbeats", "artifacts"):
        site.client.delete(another.key(name))
    another.client.hset(another.key("reports"), "f", "x")
    another.client.lpush(another.key("heartbeats"), NOT_TEXT)
    site.turn()
    assert (site.faults(), site.state(another.name)) == (2, "active")
    another.client.sadd(another.key("artifacts"), DEEP)
    site.turn()
    assert site.state(another.name) == "cordoned"
    shown = type_in("tuna", "workers")
    assert shown.code == 0, shown.err
    another.client.hset(another.key("reports"), "f", "x")
    another.client.sadd(another.key("heartbeats"), "x")
    another.client.xadd(another.key("artifacts"), {"x": "x"})
    site.turn()
    assert site.state(another.name) == "revoked"
    site.turn()
    with pytest.raises(redis.ConnectionError):
        another.client.hget(another.key("dealt"), "x")
    assert type_in("tuna", "workers", "cordon", hostile.name).code == 0
    assert type_in("tuna", "workers", "revoke", hostile.name).code == 0
    as_undisturbed(site)
    site.turn()
    assert site.is_gone(hostile)


def test_m4_a_chunk_cannot_be_kept_nor_one_be_planted(
    site: Site, hostile: MemberDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = hostile.next_chunk()
    assert mine is not None
    hostile.report(ReportKind.STARTED, mine.id)
    planted = mine.model_copy(update={"id": "f" * 32})
    for key in queue_keys(keys.WORK):
        hostile.client.lpush(
            hostile.key(key), json.dumps({"body": "x", "chunk": planted.model_dump_json()})
        )
    hostile.client.hset(hostile.key("dealt"), planted.id, "")
    hostile.report(ReportKind.STARTED, planted.id)
    site.turn()
    assert site.faults() == 1
    dealt = site.coordinator._members._dealt
    late = max(one.ends_by for one in dealt.all().values()) + 1
    monkeypatch.setattr(dealt, "now", lambda: late)
    hostile.beat(done=1)
    site.turn()
    held = site.client.hvals(site.leases.holders_key)
    assert not [token for token in held if token.startswith(hostile.name.encode())], (
        "its limits are over, whatever it says"
    )
    monkeypatch.undo()
    site.revoke(hostile)
    as_undisturbed(site)


def test_m5_nothing_that_it_queues_is_published_by_others(
    site: Site, hostile: MemberDouble
) -> None:
    queue = site.own.queues[1]
    embed = {"chain": [{"task": "tuna.run_chunk", "options": {"queue": queue}}]}
    body = json.dumps([[], {"chunk": "x"}, embed])
    message = {
        "body": body,
        "headers": {"task": "tuna.run_chunk", "id": "1"},
        "properties": {"delivery_info": {"routing_key": queue}},
    }
    for key in queue_keys(keys.WORK):
        hostile.client.lpush(hostile.key(key), json.dumps(message))
    for name in ("_kombu.binding.work", "_kombu.binding_permanent.work"):
        hostile.client.sadd(hostile.key(name), "\x06\x16".join(("", "", queue)))
    site.turn()
    assert site.client.llen(queue) == 0
    site.revoke(hostile)
    as_undisturbed(site)


def test_m8_artifacts_of_others_stay_and_have_room(
    site: Site, hostile: MemberDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = site.coordinator._artifacts.put(b"of the own worker")
    victim = site.join()
    site.turn()
    theirs = victim.next_chunk()
    assert theirs is not None
    victim.put(theirs.id, "0" * 64, b"of another member")
    hostile.put(theirs.id, "0" * 64, b"x")
    quotas = site.coordinator._members._inbox.quotas
    hostile.client.hset(hostile.key("artifacts"), "x", bytes(quotas.artifact_bytes))
    site.turn()
    assert site.client.exists(hostile.key("artifacts")) == 0
    assert site.faults() == 1
    assert site.client.hlen(victim.key("artifacts")) == 1
    assert site.coordinator._artifacts.get(kept) == b"of the own worker"
    digest = hashlib.sha256(b"good").hexdigest()
    victim.put(theirs.id, digest, b"good")
    trial = TrialResult(index=0, params="{}", artifact=digest)
    victim.report(
        ReportKind.FINISHED, theirs.id, [good(item, trials=(trial,)) for item in theirs.items]
    )
    site.turn()
    assert site.coordinator._artifacts.get(digest) == b"good"
    site.revoke(hostile)
    as_undisturbed(site, victim)


def test_quotas_of_reports(
    site: Site, hostile: MemberDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = hostile.next_chunk()
    assert mine is not None
    hostile.client.xadd(hostile.key("reports"), {"r": bytes(4 << 20)})
    site.turn()
    assert site.faults() == 1
    with hostile.client.pipeline(transaction=False) as pipe:
        for _ in range(1501):
            pipe.execute_command("XADD", hostile.key("reports"), "*", "r", "x")
        pipe.execute()
    site.turn()
    assert site.faults() == 2
    assert site.client.xlen(hostile.key("reports")) == 0
    for _ in range(2 * len(mine.items) + 9):
        hostile.report(ReportKind.STARTED, mine.id)
    for _ in range(40):
        site.coordinator._members._collector._next_at.clear()
        site.turn()
        if site.faults() > 2:
            break
    assert site.faults() == 3, "more reports about one chunk than it has items"
    site.revoke(hostile)
    as_undisturbed(site)


def test_a_member_that_gives_back_all_that_it_gets_does_not_keep_jobs_from_others(
    site: Site, hostile: MemberDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer, "_PAUSE_S", 60.0)
    given_back = 0
    for number in range(5):
        while chunk := hostile.next_chunk():
            hostile.report(ReportKind.RETURNED, chunk.id, reason="no")
            given_back += 1
        hostile.beat(done=number)
        site.turn()
    assert given_back == 2, "dealing to it pauses"
    as_undisturbed(site)


def test_s3_more_trials_than_a_chunk_can_give_are_refused_unwritten(
    site: Site, hostile: MemberDouble
) -> None:
    mine = hostile.next_chunk()
    assert mine is not None

    for counts in ((100_000,), (5000, 5001)):  # of one result, and of several
        pairs = zip(
            (json.loads(good(item).model_dump_json()) for item in mine.items), counts, strict=False
        )
        found = [
            result | {"trials": [{"index": index} for index in range(number)]}
            for result, number in pairs
        ]
        report = {"kind": "results", "chunk": mine.id, "worker": "x", "results": found}
        hostile.client.xadd(
            hostile.key("reports"), {"r": json.dumps(report, separators=(",", ":"))}
        )
        site.coordinator._members._collector._next_at.clear()
        site.turn()
    assert site.faults() == 2
    with reading(site.engine) as connection:
        assert not connection.execute(sa.select(sa.func.count()).select_from(Trial)).scalar_one()
    site.revoke(hostile)
    as_undisturbed(site)


def test_s12_whose_report_it_is_is_known_by_where_it_lay(site: Site, hostile: MemberDouble) -> None:
    """An own worker's results have no member's name: a member cannot say so of its own, nor be
    another."""
    for name in ("", "another"):
        mine = hostile.next_chunk()
        assert mine is not None
        found = [good(item, device={"name": "a card"}) for item in mine.items]
        hostile.report(ReportKind.FINISHED, mine.id, found, member=name)
        site.turn()
    with reading(site.engine) as connection:
        devices = set(
            connection.execute(sa.select(StepResult.device).where(StepResult.ok)).scalars()
        )
    assert devices == {f"a card of {hostile.name}"}
    site.revoke(hostile)
    as_undisturbed(site)

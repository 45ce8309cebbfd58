"""Entries of caches in SQL, on both databases: who is first, what is evicted, what packs hold."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest
import sqlalchemy as sa

from tuna.db import access_tokens
from tuna.db.engine import reading, transaction, writing
from tuna.db.models import CacheEntryRow
from tuna.db.types import utc_now
from tuna.errors import BadInput
from tuna_serve.db import cache_entries
from tuna_serve.db.cache_entries import CacheBounds, CacheFull, EntryName, PutOutcome

MANY = CacheBounds(1 << 40, 1 << 40)
TOKENS = ("a" * 12, "b" * 12)


@pytest.fixture
def shared(engine: sa.Engine) -> sa.Engine:
    """A database with two tokens of the space `team`."""
    with writing(engine) as connection:
        for token in TOKENS:
            access_tokens.add(connection, token, "x", "submit", 60.0, space="team")
    return engine


def put(
    engine: sa.Engine,
    key: str,
    digest: str = "",
    token: str = TOKENS[0],
    size_bytes: int = 10_000,
    bounds: CacheBounds = MANY,
) -> tuple[PutOutcome, list[str]]:
    facts = EntryName("team", key, "f"), digest or key, size_bytes, token, bounds
    return transaction(engine, cache_entries.put, *facts)


def age(engine: sa.Engine, *keys: str) -> None:
    """Let these keys be used last in this order, days ago."""
    with writing(engine) as connection:
        for number, key in enumerate(keys):
            used = {"used_at": utc_now() - timedelta(days=100 - number)}
            connection.execute(
                sa.update(CacheEntryRow).where(CacheEntryRow.key == key).values(used)
            )


def keys(engine: sa.Engine) -> list[str]:
    with reading(engine) as connection:
        return [one.key for one in cache_entries.entries_of(connection, "team")]


def test_the_first_wins_and_each_other_is_counted(shared: sa.Engine) -> None:
    ready, told = threading.Barrier(8), Counter[PutOutcome]()

    def race(number: int) -> None:
        ready.wait()
        told[put(shared, "k", f"{number}")[0]] += 1

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {PutOutcome.STORED: 1, PutOutcome.OTHER: 7}
    with reading(shared) as connection:
        (found,) = cache_entries.entries_of(connection, "team")
        (space,) = cache_entries.spaces(connection)
    assert (found.refused, space.refused, space.keys) == (7, 7, 1)
    assert put(shared, "k", found.digest)[0] is PutOutcome.SAME


def test_names_that_differ_in_case_alone_are_two(shared: sa.Engine) -> None:
    assert put(shared, "Key", "1")[0] is PutOutcome.STORED
    assert put(shared, "kEY", "2")[0] is PutOutcome.STORED
    with reading(shared) as connection:
        (found,) = cache_entries.entries_of(connection, "team", "kEY", ["f"])
        assert cache_entries.entries_of(connection, "team", "kEY", ["F"]) == []
    assert found.digest == "2"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\0", "a\n", "ä", "a b", "x" * 256, "a\\b"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    for names in (("team", name, "f"), ("team", "k", name), (name, "k", "f")):
        with pytest.raises(BadInput, match="name of a"):
            EntryName(*names)
    with pytest.raises(BadInput, match="no name of a space"):
        EntryName("Team", "k", "f")
    EntryName("team", "x" * 255, "__grp__a.json")


def test_the_least_used_go_first_and_none_that_a_pack_holds(shared: sa.Engine) -> None:
    for key in ("d", "c", "b", "a"):
        put(shared, key)
    age(shared, "c", "d", "a", "b")
    with writing(shared) as connection:
        cache_entries.hold(connection, "team", ["c", "gone"], "pack")
    fits = CacheBounds(47_000, 1 << 40)
    assert put(shared, "e", bounds=fits) == (PutOutcome.STORED, ["d"])
    assert keys(shared) == ["a", "b", "c", "e"]
    with writing(shared) as connection:
        cache_entries.hold(connection, "team", ["a", "b", "e"], "other")
        cache_entries.hold(connection, "team", [], "pack")  # made again, without it
    assert put(shared, "g", bounds=fits) == (PutOutcome.STORED, ["c"])
    with writing(shared) as connection:
        cache_entries.hold(connection, "team", ["g"], "pack")
    with pytest.raises(CacheFull, match="packs hold"):
        put(shared, "h", bounds=fits)
    assert keys(shared) == ["a", "b", "e", "g"]


def test_a_token_makes_room_among_its_own(shared: sa.Engine) -> None:
    theirs, mine = TOKENS
    put(shared, "theirs", token=theirs)
    for key in ("x", "y"):
        put(shared, key, token=mine)
    age(shared, "theirs", "x", "y")
    bounds = CacheBounds(1 << 40, 25_000)
    assert put(shared, "z", token=mine, bounds=bounds) == (PutOutcome.STORED, ["x"])
    with pytest.raises(CacheFull, match="of this token"):
        put(shared, "large", token=mine, size_bytes=30_000, bounds=bounds)
    assert keys(shared) == ["theirs", "y", "z"]


def test_keys_are_listed_by_when_they_were_put(shared: sa.Engine) -> None:
    for key in ("b", "a", "c"):
        put(shared, key)
    with reading(shared) as connection:
        found = cache_entries.newest(connection, "team", 2)
        assert [one["key"] for one in found] == ["c", "a"]
        assert found[0]["files"] == {"f": 10_000}
        assert cache_entries.newest(connection, "team", 2, "_") == []  # no pattern
        assert len(cache_entries.newest(connection, "team", 9, "f")) == 3
        assert cache_entries.newest(connection, "tea", 9) == []


def test_what_was_not_used_is_pruned_but_for_packs(shared: sa.Engine) -> None:
    for key in ("a", "b", "c"):
        put(shared, key)
    age(shared, "a", "b")
    since = utc_now() - timedelta(days=30)
    with writing(shared) as connection:
        cache_entries.hold(connection, "team", ["b"], "pack")
        assert [one.key for one in cache_entries.prune(connection, "team", [], since)] == ["a"]
        assert [one.key for one in cache_entries.prune(connection, "team", ["b"], None)] == ["b"]
    assert keys(shared) == ["c"]

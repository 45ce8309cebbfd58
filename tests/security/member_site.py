"""A Redis with access lists, a coordinator, an own worker, and members that joined through the
gate: whom a test attacks."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from member_double import HOME, MemberDouble
from member_room import OwnWorker, Room

from tuna.api.workers import set_worker_state
from tuna.db.engine import writing
from tuna.db.models import Job
from tuna.membership.access import Access
from tuna.membership.join import Facts, join
from tuna.queue import keys
from tuna.tls import checked

#: Between the rounds of a coordinator that waits for the lease of a member.
_PAUSE_S = 0.2


def servers() -> list[Any]:
    """Executables of Redis and Valkey: the one that Tuna would take, and for drills all of PATH and
    TUNA_TEST_REDIS_SERVERS."""
    given = filter(None, os.environ.get("TUNA_TEST_REDIS_SERVERS", "").split(":"))
    folders = [Path(folder) for folder in os.get_exec_path()]
    there = {
        str(folder.resolve() / name)
        for folder in folders
        for name in ("redis-server", "valkey-server")
    }
    found = sorted({*given, *filter(shutil.which, there)})
    return ["", *(pytest.param(path, marks=pytest.mark.drill(only=True)) for path in found)]


class Site(Room):
    """One session with an own worker beside members."""

    def __init__(
        self, engine: sa.Engine, client: redis.Redis, url: str, folder: Path, layers: int
    ) -> None:
        """`url`: of Redis, without a password."""
        super().__init__(engine, client, layers)
        self.url = checked(url)
        self.own = OwnWorker(self, folder / "own")

    def join(self, role: str = "compile") -> MemberDouble:
        """A member that joined with a token, with its own credentials, and a heartbeat."""
        token = self.coordinator._gate.create_token(role, 60, self.url)  # type: ignore[arg-type]
        names = (
            {"toolchains": (HOME.toolchain,)}
            if role == "compile"
            else {"environments": (HOME.machine_key,)}
        )
        told: dict[str, str] = {}
        facts = Facts(host="h", pid=7, **names)  # type: ignore[arg-type]
        asking = threading.Thread(target=lambda: told.update(join(token.full(), role, facts, 30)))  # type: ignore[arg-type]
        asking.start()
        while asking.is_alive():
            self.coordinator._gate.tick()
            time.sleep(0.02)
        client: redis.Redis = redis.Redis.from_url(told["TUNA_BROKER_URL"])
        member = MemberDouble(client, self.namespace, told["TUNA_WORKER_NAME"], role)
        member.url = told["TUNA_BROKER_URL"]
        member.beat()
        return member

    def finish(self, *others: MemberDouble, seconds: float = 30.0) -> None:
        """Work until all is done, with the own worker and `others`."""
        deadline = time.monotonic() + seconds
        while not self.is_done():
            assert time.monotonic() < deadline, self.failures()[:5]
            with writing(self.engine) as connection:
                connection.execute(sa.update(Job).values(ready_at=None))  # a retry need not wait
            self.turn()
            self.own.work()
            for one in others:
                one.beat()
                one.work()
            time.sleep(_PAUSE_S)

    def revoke(self, member: MemberDouble) -> None:
        """As `tuna workers revoke` does."""
        set_worker_state(member.name, "revoked")

    def is_gone(self, member: MemberDouble) -> bool:
        """Whether nothing of a member is left in Redis."""
        left = self.client.exists(*keys.all_keys(self.namespace, member.name))
        return (
            not left
            and Access(self.client, self.namespace).user(member.name) not in self.client.acl_users()
        )


def granted(
    client: redis.Redis, commands: Sequence[Sequence[str]]
) -> list[tuple[Sequence[str], object]]:
    """Those of the commands that the client had the right to, with the answers."""
    with client.pipeline(transaction=False) as pipe:
        for words in commands:
            pipe.execute_command(*words)
        answers = pipe.execute(raise_on_error=False)
    return [pair for pair in zip(commands, answers, strict=True) if not _is_refused(pair[1])]


def _is_refused(answer: object) -> bool:
    said = str(answer).lower()
    return isinstance(answer, redis.ResponseError) and (
        "permission" in said or "debug command not allowed" in said
    )

"""An installation whose workers join: what tests of tokens and of revocation share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import redis
import sqlalchemy as sa

from tuna.db.engine import reading
from tuna.db.models import Token, Worker
from tuna.libraries.registry import get_library
from tuna.membership.gate import Gate
from tuna.membership.join import Facts, JoinToken, Role, join, join_user
from tuna.queue import keys
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.queue.leases import Leases
from tuna.testing.servers import with_password

HOME = get_library("noop").environment()
COMPILER = Facts(host="some host", pid=7, toolchains=(HOME.toolchain,))
DEVICE = Facts(host="card1", pid=8, device="card", environments=(HOME.machine_key,))
#: Bytes that are no text.
ODD = b"\xff\xfe\x00\n*?["


@dataclass
class Site:
    """An installation with a session, a Redis and a coordinator's gate."""

    url: str
    namespace: str
    engine: sa.Engine
    admin: redis.Redis

    def __post_init__(self) -> None:
        self.gate = self.new_gate()

    def new_gate(self) -> Gate:
        return Gate(self.engine, self.admin, self.namespace, 20, self.leases(self.admin).evict)

    def leases(self, client: redis.Redis) -> Leases:
        return Leases(client, self.namespace, 20)

    def while_ticking(self, act: Callable[[], object]) -> object:
        """What `act` returns while a coordinator answers."""
        stop = threading.Event()

        def tick() -> None:
            while not stop.wait(0.02):
                self.gate.tick()

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            return act()
        finally:
            stop.set()
            thread.join()

    def token(self, role: Role = "compile") -> JoinToken:
        return self.gate.create_token(role, 60, self.url)

    def of_token(self, token: JoinToken) -> redis.Redis:
        return redis.Redis.from_url(
            with_password(self.url, token.password, join_user(self.namespace, token.id))
        )

    def member(self, role: Role = "compile", facts: Facts = COMPILER) -> tuple[str, redis.Redis]:
        """A worker that joined: its name, and its own client."""
        told = self.while_ticking(lambda: join(self.token(role).full(), role, facts, 10))
        return told["TUNA_WORKER_NAME"], redis.Redis.from_url(told["TUNA_BROKER_URL"])

    def left(self, *whose: str) -> list[str]:
        """Keys and users in Redis that have one of these names in theirs."""
        names = [
            key.decode(errors="replace") for key in self.admin.scan_iter()
        ] + self.admin.acl_users()
        return [name for name in names if any(one in name for one in whose)]

    def worker(self, name: str) -> sa.Row:
        with reading(self.engine) as connection:
            return connection.execute(sa.select(Worker.__table__).where(Worker.name == name)).one()

    def token_row(self, token: JoinToken) -> sa.Row:
        with reading(self.engine) as connection:
            return connection.execute(sa.select(Token.__table__).where(Token.id == token.id)).one()


def occupy(site: Site, name: str) -> None:
    """Give a member all that a member has: a lease, heartbeats, an order, and something in each of
    its keys."""
    leases = site.leases(site.admin)
    leases.open([f"c-{name}"])
    assert leases.take(f"c-{name}", f"{name}:1/t", "started")
    board = HeartbeatBoard(site.admin, site.namespace, 20)
    board.announce(WorkerStatus(f"{name}:1", "compile", "h", 1, "", "", ("t",), (1,), 1.0, 1.0))
    site.admin.sadd(f"tuna:{{{site.namespace}}}:workers", f"{name}:".encode() + ODD)
    site.gate.control(name, "cordoned")
    # as versions before the gate did
    site.admin.set(f"tuna:{{{site.namespace}}}:order:{name}", "cordoned")
    for number, key in enumerate(keys.all_keys(site.namespace, name)):
        site.admin.delete(key)
        site.admin.rpush(key, ODD) if number % 2 else site.admin.hset(key, ODD, ODD)

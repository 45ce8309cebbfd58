"""Redis users of members and of tokens: names, rights, and taking them away again.

A member's user reaches the keys in `keys.all_keys`, each by its exact name, with the commands in
`keys.COMMANDS`; a token's user reaches the two keys of its request. Neither runs scripts, lists
keys, has channels, or enters another database.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import redis

from tuna.membership.join import answer_key, join_user, password_of, request_key
from tuna.membership.members import NewWorker
from tuna.queue import keys
from tuna.services import redis_client

_JOIN_COMMANDS = "auth hello ping set getdel"
_GLOB = re.compile(r"([*?\[\]\\])")
#: A blank ends an ACL pattern, so that a name with one would become another name.
_BLANK = re.compile(r"[\s\x00]")


class Access:
    """The Redis users of one database's members and tokens."""

    def __init__(self, admin: redis.Redis, namespace: str) -> None:
        """`admin`: a client that may administer users."""
        self._admin: Any = admin  # redis-py has no types for raw commands
        self._namespace = namespace
        self._database = int(admin.connection_pool.connection_kwargs.get("db") or 0)

    def check(self) -> None:
        """Raise redis' NoPermissionError if this user may not administer users; changes nothing."""
        self._admin.execute_command("ACL DELUSER", self.user("nobody"))

    def users(self) -> set[str]:
        """Names of this database's users: those of members, and those of tokens."""
        names = {redis_client.text(name) for name in self._admin.execute_command("ACL USERS")}
        return {name for name in names if name.startswith(self.user(""))}

    def user(self, worker: str) -> str:
        """Name of a member's Redis user."""
        return f"tuna-{self._namespace}-{worker}"

    def worker(self, user: str) -> str:
        """The inverse of `user`."""
        return user.removeprefix(self.user(""))

    def admit(self, worker: NewWorker) -> None:
        """Make a member's user, or give it the rights of this version."""
        self._make(self.user(worker.name), worker.password, self._member_rules(worker.name))

    def admit_token(self, token_id: str, digest: str) -> None:
        """Make a token's user; `digest`: SHA-256 (hex) of its secret."""
        read, written = (
            request_key(self._namespace, token_id),
            answer_key(self._namespace, token_id),
        )
        password = hashlib.sha256(password_of(digest).encode()).hexdigest()
        self._make(
            join_user(self._namespace, token_id),
            password,
            self._rules([read, written], _JOIN_COMMANDS),
        )

    def remove(self, user: str) -> bool:
        """Delete a user, which closes its connections; False if there was none."""
        return bool(self._admin.execute_command("ACL DELUSER", user))

    @property
    def rights(self) -> str:
        """SHA-256 (first 16 hex digits) of what members may do: differs between versions that grant
        other rights."""
        return hashlib.sha256("\n".join(self._member_rules("")).encode()).hexdigest()[:16]

    def _make(self, name: str, password: str, rules: Sequence[str]) -> None:
        self._admin.execute_command("ACL SETUSER", name, "reset", "on", f"#{password}", *rules)

    def _member_rules(self, worker: str) -> list[str]:
        return self._rules(keys.all_keys(self._namespace, worker), keys.COMMANDS)

    def _rules(self, names: Sequence[str], commands: str) -> list[str]:
        words = commands.split() + (
            [f"select|{self._database}"] if self._database else []
        )  # clients begin in database 0
        return [
            "resetchannels",
            *(f"~{_exact(name)}" for name in names),
            "-@all",
            *(f"+{word}" for word in words),
        ]


def _exact(name: str) -> str:
    """The ACL pattern that matches `name` alone. Raises ValueError for a name with a blank, which
    no pattern can hold."""
    if _BLANK.search(name):
        raise ValueError(f"a blank in the name of a key: {name!r}")
    return _GLOB.sub(r"\\\1", name)

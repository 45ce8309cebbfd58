"""Tokens and members in both databases: what is used up, what is still to be cleared."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa

from tuna.db.engine import reading, writing
from tuna.db.types import utc_now
from tuna.membership import members
from tuna.membership.members import NewWorker


def _worker(name: str) -> NewWorker:
    """Of the longest texts that a request may have."""
    return NewWorker(
        name=name,
        role="eval",
        host="\N{SNAKE}" * 255,
        device="Größe" * 51,
        environments=tuple(f"{number:016x}" for number in range(64)),
        toolchains=tuple(f"{number:03}" * 85 for number in range(64)),
        password="0" * 64,
        processes=256,
        rights="f" * 16,
    )


def test_what_is_spent_is_cleared_once(engine: sa.Engine) -> None:
    soon = utc_now() + timedelta(hours=1)
    with writing(engine) as connection:
        for token_id, expires_at in (
            ("open", soon),
            ("used", soon),
            ("revoked", soon),
            ("expired", utc_now()),
        ):
            members.add_token(connection, token_id, "0" * 64, "eval", expires_at)
        assert members.admit(connection, "used", _worker("a"))
        assert not members.admit(connection, "used", _worker("b")), "it lets one in, once"
        assert not members.use_token(connection, "expired")
        members.revoke_token(connection, "revoked")
    with reading(engine) as connection:
        assert [row.id for row in members.spent_tokens(connection)] == [
            "expired",
            "revoked",
            "used",
        ]
        assert len(members.spent_tokens(connection, 2)) == 2
        assert members.uncleared_members(connection, 10) == []
        (found,) = members.members(connection)
        assert (found.host, found.toolchains) == (_worker("a").host, _worker("a").toolchains)
    for state in ("gone", "revoked"):
        with writing(engine) as connection:
            assert members.set_state(connection, "a", state) is (state == "gone"), (
                "what is over stays so"
            )
    with writing(engine) as connection:
        ((name, ended),) = members.uncleared_members(connection, 10)
        assert name == "a"
        assert abs((utc_now() - ended).total_seconds()) < 60
        members.set_cleared(connection, ["a"], ["used", "expired"])
        members.set_cleared(connection, [], ["revoked"])
    with reading(engine) as connection:
        assert members.uncleared_members(connection, 10) == []
        assert members.spent_tokens(connection) == []
        assert [row.id for row in members.tokens(connection, only_open=True)] == ["open"]

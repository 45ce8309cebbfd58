"""Rotation of the key that signs artifacts: a new secret in SQL; the former public key is accepted
for a while.

In that time workers finish the chunks in which they sign with the former key, and reports that name
such artifacts are drained. What jobs need is signed again: by the command that rotates, and once
more by a coordinator before it forgets the former key. Each step may be repeated, by several at
once; what no accepted key signed is refused, and compiled again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

import redis
import sqlalchemy as sa
import structlog

from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.db import sessions
from tuna.db.engine import reading, transaction
from tuna.db.models import FormerKey, Installation, JobArtifact
from tuna.db.types import utc_now
from tuna.membership.members import members
from tuna.queue import keys
from tuna.queue.announcements import signer_key
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: How long a former key is accepted: longer than a chunk takes, and than Redis keeps artifacts that
#: are not renewed.
ACCEPTED = timedelta(days=1)
_PAGE = 200
#: Expiry of a member's public keys, which coordinators publish again each second.
_PUBLIC_TTL_S = 600


class Page(NamedTuple):
    """Artifacts that jobs need, after they were signed again."""

    last: str  #: digest, where the next page begins; empty: there is none
    signed: int  #: with the current key
    refused: int  #: signed by no accepted key, so that their jobs are compiled again


def replace(engine: sa.Engine, settings: Settings, *, leaked: bool) -> None:
    """Make a new secret; the former key, and those before it, are accepted for a while, or no more
    at all if `leaked`."""

    def rotate(connection: sa.Connection) -> None:
        row = sa.select(Installation.id).with_for_update()  # one rotation after the other
        connection.execute(row)
        former = sessions.artifact_keys(connection, settings).public[0]
        if leaked:
            connection.execute(sa.delete(FormerKey))
        else:
            connection.execute(sa.insert(FormerKey).values(public=former, superseded_at=utc_now()))
        connection.execute(sa.update(Installation).values(secret=secrets.token_hex(32)))

    transaction(engine, rotate)


def announce(engine: sa.Engine, client: redis.Redis, settings: Settings, namespace: str) -> Keys:
    """Publish the keys of artifacts as they are in SQL: to own workers with the secret, to members
    without; returns them."""
    # Read before SQL, so that a coordinator never replaces a newer key by the one that it read
    # earlier.
    published = client.get(signer_key(namespace))
    with reading(engine) as connection:
        found = sessions.artifact_keys(connection, settings)
        names = [member.name for member in members(connection)]
    # else own workers have it, too
    if published != found.to_json().encode() and settings.artifacts_key is None:
        client.set(signer_key(namespace), found.to_json())
    with client.pipeline(transaction=False) as pipe:
        for name in names:  # with an expiry, for one that is revoked at this moment
            pipe.set(
                keys.prefix(namespace, name) + "public", found.verifier.to_json(), ex=_PUBLIC_TTL_S
            )
        pipe.execute()
    return found


def sign_page(engine: sa.Engine, artifacts: Artifacts, after: str = "") -> Page:
    """Sign again the next artifacts that jobs need, in the order of their digests; raises what the
    store does."""
    query = (  # primary key (digest, job_id): a range in order
        sa.select(JobArtifact.digest)
        .where(JobArtifact.digest > after)
        .distinct()
        .order_by(JobArtifact.digest)
        .limit(_PAGE)
    )
    with reading(engine) as connection:
        digests = list(connection.execute(query).scalars())
    refused = len(artifacts.sign_again(digests))
    return Page(digests[-1] if len(digests) == _PAGE else "", len(digests) - refused, refused)


def sign_all(engine: sa.Engine, artifacts: Artifacts) -> Iterator[Page]:
    """Sign again all artifacts that jobs need, page by page."""
    page = sign_page(engine, artifacts)
    yield page
    while page.last:
        page = sign_page(engine, artifacts, page.last)
        yield page


def accepted_until(connection: sa.Connection) -> dict[str, datetime]:
    """When former keys are forgotten, by public key."""
    rows = connection.execute(sa.select(FormerKey.public, FormerKey.superseded_at)).all()
    return {row.public: row.superseded_at + ACCEPTED for row in rows}


class Retirement:
    """Forgets former keys when their time is over; a coordinator calls `tick` about once a
    second."""

    def __init__(self, engine: sa.Engine, artifacts: Artifacts) -> None:
        self._engine = engine
        self._artifacts = artifacts
        self._after = ""

    def tick(self) -> None:
        """Sign a page of artifacts again; after the last one forget the keys that are due."""
        due = FormerKey.superseded_at < utc_now() - ACCEPTED
        with reading(self._engine) as connection:
            former = list(connection.execute(sa.select(FormerKey.public).where(due)).scalars())
        if not former:
            return
        self._after = sign_page(self._engine, self._artifacts, self._after).last
        if self._after:
            return
        forget = sa.delete(FormerKey).where(FormerKey.public.in_(former))
        transaction(self._engine, sa.Connection.execute, forget)
        log.info("former keys of artifacts forgotten", count=len(former))

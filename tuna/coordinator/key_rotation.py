"""Rotation of the key that signs artifacts: a new secret in SQL; the former public key is accepted
until the next rotation.

So workers finish the chunks in which they sign with the former key, and reports that name such
artifacts are drained. The command that rotates signs again what jobs need. It may be repeated; what
no accepted key signed is refused, and compiled again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import NamedTuple

import redis
import sqlalchemy as sa

from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.db import sessions
from tuna.db.engine import reading, transaction
from tuna.db.models import FormerKey, Installation, JobArtifact
from tuna.db.types import utc_now
from tuna.queue.announcements import signer_key
from tuna.settings import Settings

_PAGE = 200


class Page(NamedTuple):
    """Some artifacts that jobs need, after they were signed again."""

    signed: int  #: number of artifacts signed with the current key
    #: number of artifacts that no accepted key had signed: their jobs are compiled again
    refused: int


def replace(engine: sa.Engine, settings: Settings, *, leaked: bool) -> Keys:
    """Make a new secret; the former key is accepted until the next rotation, those before it no
    more, and none at all if `leaked`. Returns the keys to sign again with, which accept all that
    were accepted before unless `leaked`."""

    def rotate(connection: sa.Connection) -> Keys:
        row = sa.select(Installation.id).with_for_update()  # one rotation after the other
        connection.execute(row)
        before = sessions.artifact_keys(connection, settings).public
        secret = secrets.token_hex(32)
        connection.execute(sa.delete(FormerKey))
        if not leaked:
            values = {"public": before[0], "superseded_at": utc_now()}
            connection.execute(sa.insert(FormerKey).values(**values))
        connection.execute(sa.update(Installation).values(secret=secret))
        return Keys.of_secret(secret, () if leaked else before)

    return transaction(engine, rotate)


def announce(engine: sa.Engine, client: redis.Redis, settings: Settings, namespace: str) -> Keys:
    """Publish the keys of artifacts, the secret included, as they are in SQL; returns them."""
    # Read before SQL, so that a coordinator never replaces a newer key by the one that it read
    # earlier.
    published = client.get(signer_key(namespace))
    with reading(engine) as connection:
        found = sessions.artifact_keys(connection, settings)
    # else own workers have it, too
    if published != found.to_json().encode() and settings.artifacts_key is None:
        client.set(signer_key(namespace), found.to_json())
    return found


def sign_all(engine: sa.Engine, artifacts: Artifacts) -> Iterator[Page]:
    """Sign again all artifacts that jobs need, page by page in the order of their digests; raises
    what the store does."""
    digests = [""]
    while digests:
        query = (  # primary key (digest, job_id): a range in order
            sa.select(JobArtifact.digest)
            .where(JobArtifact.digest > digests[-1])
            .distinct()
            .order_by(JobArtifact.digest)
            .limit(_PAGE)
        )
        with reading(engine) as connection:
            digests = list(connection.execute(query).scalars())
        refused = len(artifacts.sign_again(digests))
        yield Page(len(digests) - refused, refused)

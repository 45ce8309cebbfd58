"""The database and the services: schema, keys of artifacts, metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.artifacts.signatures import key_id
from tuna.artifacts.store import Artifacts
from tuna.coordinator import key_rotation
from tuna.db import database, sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.models import Base
from tuna.errors import BadInput
from tuna.jobs import needed_artifacts
from tuna.queue.connection import connect, ensure_services
from tuna.reports.prometheus import serve
from tuna.settings import get_settings


@dataclass(frozen=True)
class Upgrade:
    """A change of the schema: revisions before (None: the database was empty) and after."""

    url: str  #: URL of the database without its password
    before: str | None
    after: str


@dataclass(frozen=True)
class SigningKey:
    """A key that verifies artifacts, by its id."""

    id: str
    public: str  #: public key, hex
    signs: bool  #: true for the current key; a former one is accepted until the next rotation


@dataclass(frozen=True)
class RotatedKey:
    """A new key, and how many of the artifacts that jobs need have its signature."""

    key: SigningKey
    signed: int  #: number of artifacts that the new key has signed
    #: number of artifacts that no accepted key had signed: their jobs are compiled again
    refused: int


def namespace(engine: sa.Engine) -> str:
    """The namespace that separates a database's keys from others' in a shared Redis."""
    with reading(engine) as connection:
        return sessions.namespace(connection)


def artifact_store(engine: sa.Engine) -> Artifacts:
    """The artifact store, with the keys that sign and verify."""
    settings = get_settings()
    with reading(engine) as connection:
        keys = sessions.artifact_keys(connection, settings)
        return Artifacts.from_settings(settings, sessions.namespace(connection), keys)


def artifacts_of_models() -> Artifacts:
    """The store that has the files of models, whose digests are in SQL: no signature is needed."""
    with reading(open_database()) as connection:
        return Artifacts.from_settings(get_settings(), sessions.namespace(connection))


def remove_unneeded(digests: Collection[str], beside: Collection[str] = ()) -> None:
    """Remove the artifacts that no row names, and none of `beside`."""
    with reading(open_database()) as connection:
        needed = needed_artifacts.in_use(connection, digests)
    if unneeded := sorted({*digests} - needed - {"", *beside}):
        artifacts_of_models().remove(unneeded)


def upgrade_database() -> Upgrade:
    """Bring the schema of the database to the one that this version needs."""
    engine = database.connect_database()
    before = database.revision(engine)
    database.upgrade(engine)
    return Upgrade(engine.url.render_as_string(hide_password=True), before, database.HEAD)


def list_tables() -> list[str]:
    """The names of all tables that a database with the current schema has."""
    return sorted(Base.metadata.tables)


def serve_metrics(listen: str, started: Callable[[str], None]) -> None:
    """Answer Prometheus at `listen` (HOST:PORT) until Ctrl-C; `started` gets the URL."""
    serve(database.connect_database(), get_settings(), listen, started)


def list_keys() -> list[SigningKey]:
    """Return the key that signs artifacts, then the former one, if it is still accepted."""
    with reading(open_database()) as connection:
        keys = sessions.artifact_keys(connection, get_settings())
    return [
        SigningKey(key_id(public), public, number == 0) for number, public in enumerate(keys.public)
    ]


def rotate_key(*, leaked: bool = False) -> RotatedKey:
    """Sign artifacts with a new key from now on, and sign again what jobs need.

    `leaked`: what former keys signed is refused at once, and compiled again. Raises BadInput where
    TUNA_ARTIFACTS_KEY is the key, ServiceError if Redis or the artifact store does not answer.
    """
    settings, engine = get_settings(), open_database()
    if settings.artifacts_key is not None:
        raise BadInput(
            "TUNA_ARTIFACTS_KEY is the key of artifacts here, so it cannot be rotated in the"
            " database.",
            hint=(
                "set it to another one (`openssl rand -hex 32`) for each coordinator and own"
                " worker, and restart them: what jobs still need is compiled again"
            ),
        )
    ensure_services(settings)
    client = connect(settings)
    keys = key_rotation.replace(engine, settings, leaked=leaked)
    key_rotation.announce(engine, client, settings, namespace(engine))
    store = artifact_store(engine)
    store.keys = keys
    signed = refused = 0
    for page in key_rotation.sign_all(engine, store):
        signed, refused = signed + page.signed, refused + page.refused
    return RotatedKey(list_keys()[0], signed, refused)

"""Keys of artifacts: which sign and verify, and their rotation."""

from __future__ import annotations

from dataclasses import dataclass

from tuna.api.services import artifact_store
from tuna.artifacts.signatures import key_id
from tuna.coordinator import key_rotation
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.queue.connection import connect, ensure_services
from tuna.settings import get_settings


@dataclass(frozen=True)
class SigningKey:
    """A key that verifies artifacts, by its id."""

    id: str
    public: str  #: hex
    signs: bool  #: the current one; a former one is accepted until the next rotation


@dataclass(frozen=True)
class RotatedKey:
    """A new key, and how many of the artifacts that jobs need have its signature."""

    key: SigningKey
    signed: int  #: with it
    refused: int  #: no accepted key signed them: their jobs are compiled again


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
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    key_rotation.announce(engine, client, settings, namespace)
    store = artifact_store(engine)
    store.keys = keys
    signed = refused = 0
    for page in key_rotation.sign_all(engine, store):
        signed, refused = signed + page.signed, refused + page.refused
    return RotatedKey(list_keys()[0], signed, refused)

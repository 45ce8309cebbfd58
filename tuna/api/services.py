"""The database and the services: schema, checks, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa

    from tuna.artifacts.store import Artifacts
    from tuna.doctor.findings import Finding
    from tuna.libraries.noise_records import NoiseRecord, Quiet


@dataclass(frozen=True)
class Upgrade:
    """A change of the schema: revisions before (None: the database was empty) and after."""

    url: str  #: without its password
    before: str | None
    after: str


def open_database() -> sa.Engine:
    """The database of the settings with a current schema: an embedded one is created and upgraded
    automatically."""
    from tuna.db import database

    return database.open_database()


def artifact_store(engine: sa.Engine) -> Artifacts:
    """The artifact store, with the keys that sign and verify."""
    from tuna.artifacts.store import Artifacts
    from tuna.db import sessions
    from tuna.db.engine import reading
    from tuna.settings import get_settings

    settings = get_settings()
    with reading(engine) as connection:
        keys = sessions.artifact_keys(connection, settings)
        return Artifacts.from_settings(settings, sessions.namespace(connection), keys)


def upgrade_database() -> Upgrade:
    """Bring the schema of the database to the one that this version needs."""
    from tuna.db import schema
    from tuna.db.database import connect_database

    engine = connect_database()
    before = schema.revision(engine)
    schema.upgrade(engine)
    return Upgrade(engine.url.render_as_string(hide_password=True), before, schema.HEAD)


def list_tables() -> list[str]:
    """The names of all tables that a database with the current schema has."""
    from tuna.db.models import Base

    return sorted(Base.metadata.tables)


def doctor(library: str | None = None) -> list[Finding]:
    """Check this machine and its services, with hints; of the libraries only `library`, if it is
    given."""
    from tuna.doctor import check

    return check(library)


def measure_noise(
    pairs: int = 15, *, on_pair: Callable[[int], None] = lambda _: None
) -> NoiseRecord:
    """Measure what builds on the other cores do to fixed kernels on a measuring core, and keep it
    for TUNA_QUIET=auto.

    Waits while this machine measures. `on_pair` is called with the number of each pair. Takes one
    to three seconds a pair.
    """
    from tuna.files import make_home
    from tuna.libraries import noise, noise_records
    from tuna.sandbox.cores import eval_cpus
    from tuna.sandbox.device_lock import device_lock
    from tuna.settings import get_settings

    settings = get_settings()
    make_home(settings.home)
    with device_lock(f"cpu{cpu}" for cpu in eval_cpus(settings)):
        found = noise.measure(settings, pairs, on_pair)
    noise_records.store(found, settings)
    return found


def quiet_needed() -> Quiet:
    """Whether builds stop while this machine's cores are measured, by TUNA_QUIET and the last
    finding, and why."""
    from tuna.libraries.noise_records import quiet_needed
    from tuna.settings import get_settings

    return quiet_needed(get_settings())


def serve_metrics(listen: str, started: Callable[[str], None]) -> None:
    """Answer Prometheus at `listen` (HOST:PORT) until Ctrl-C; `started` gets the URL."""
    from tuna.db.database import connect_database
    from tuna.reports.prometheus import serve
    from tuna.settings import get_settings

    serve(connect_database(), get_settings(), listen, started)

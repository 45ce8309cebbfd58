"""Every setting of Tuna, once: `TUNA_*` environment variables over an optional `tuna.toml` over defaults."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import AfterValidator, AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from tuna.errors import BadInput


def _cpu_set(value: str) -> str:
    parse_cpus(value)
    return value


def parse_cpus(text: str) -> tuple[int, ...]:
    """Cores named by a list such as `0,2-5`, ascending; raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low < 0 or high < low:
            raise ValueError(f"{part!r} is not a core or a range of cores")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


class Settings(BaseSettings):
    """Settings of one process; names are the upper-case field names with `TUNA_` in front."""

    model_config = SettingsConfigDict(env_prefix="TUNA_", extra="forbid", frozen=True, populate_by_name=True)

    home: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("tuna")),
        description="where the embedded database, Redis socket, artifacts and logs live",
    )
    db_url: SecretStr | None = Field(None, description="SQLAlchemy URL; default: SQLite file in TUNA_HOME")
    redis_url: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("TUNA_REDIS_URL", "CELERY_RESULT_BACKEND"),
        description="Redis of results and leases; default: the broker if it is Redis, else embedded. "
        "CELERY_RESULT_BACKEND is honoured too",
    )
    broker_url: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("TUNA_BROKER_URL", "CELERY_BROKER_URL"),
        description="Celery broker; default: the embedded Redis. CELERY_BROKER_URL is honoured too",
    )
    artifacts_url: str | None = Field(None, description="fsspec URL of the artifact store; default: in TUNA_HOME")
    eval_cpus: Annotated[str, NoDecode, AfterValidator(_cpu_set)] = Field(
        "", description="cores that measure, such as 1 or 4-7; default: the last core of this machine"
    )
    rocm_path: Path = Field(Path("/opt/rocm"), description="where ROCm is installed")
    fin: Path | None = Field(None, description="the program fin, which tunes MIOpen; default: bin/fin of ROCm")
    lease_s: float = Field(20.0, gt=1.0, description="seconds without a heartbeat after which a worker counts as lost")
    max_attempts: int = Field(3, ge=1, description="failed attempts after which a job is errored")
    claim_batch: int = Field(2000, ge=1, description="jobs claimed in one transaction")
    queue_bound: int = Field(256, ge=1, description="chunks that may wait in one queue (backpressure)")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = Field(
        "WARNING", description="level of the log on stderr"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line, as logstash takes them")
    allow_exec: bool = Field(False, description="whether a worker here runs what `go_fish.py --exec` asks it to")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = Path(os.environ.get("TUNA_CONFIG", "tuna.toml"))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=toml)

    @property
    def embedded_db(self) -> bool:
        """Whether SQL is the SQLite file that Tuna looks after by itself."""
        return self.db_url is None

    @property
    def sql_url(self) -> str:
        """The SQLAlchemy URL to use, secrets included: never print it."""
        if self.db_url is not None:
            return self.db_url.get_secret_value()
        return f"sqlite:///{self.home / 'tuna.sqlite'}"

    @property
    def run_dir(self) -> Path:
        """Sockets, locks and logs of the processes that run now."""
        return self.home / "run"


@functools.lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read once; raises BadInput that names the setting and the fault."""
    try:
        return Settings()
    except ValidationError as error:
        raise BadInput(_first_fault(error.errors()[0])) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"The settings file cannot be read: {error}") from None


def _first_fault(fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    name = name if name.startswith(("TUNA_", "CELERY_")) else f"TUNA_{name.upper()}"
    return f"The setting {name} is not usable: {fault['msg']}."

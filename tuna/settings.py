"""All settings: `TUNA_*` environment variables override an optional settings file, which overrides
the defaults. A package's settings are a `SettingsSection` under the entry point group
`tuna.settings`:

    [project.entry-points."tuna.settings"]
    mine = "my_package.settings:MySettings"
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import platformdirs
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from tuna.common.files import check_home
from tuna.common.messages import nearest
from tuna.common.setting_values import command, cpu_set, hex_key, named, publishing_policy, verified
from tuna.common.settings_file import settings_file
from tuna.errors import BadInput
from tuna.plugins import Plugins

if TYPE_CHECKING:
    from sqlalchemy import URL

#: URL of a Redis or a broker, verified if it is encrypted
_ServerUrl = Annotated[SecretStr, AfterValidator(verified)]


def _default_home() -> Path:
    """Return the folder `tuna` among the user's data; raises BadInput for a user without a
    home."""
    try:
        found = Path(platformdirs.user_data_dir("tuna"))
    except RuntimeError:
        found = Path("~")
    if not found.is_absolute():  # older releases of platformdirs leave `~` without a home
        raise BadInput("This user has no home folder.", hint="set TUNA_HOME, or HOME")
    return found


#: Settings of distributions beside the core: a file may have them where these are not installed.
OF_DISTRIBUTIONS = {
    "tuna-models": ("model_memory_mib", "model_cpu_s"),
    "tuna-serve": (
        *("request_mib", "request_memory_mib", "request_cpu_s", "service_memory_mib"),
        *("submit_open", "submit_trials", "submit_mib", "submit_priority"),
        *("space_mib", "space_token_mib"),
    ),
}
#: Names in the settings file that only a distribution knows which is not installed, with its name.
_ignored: dict[str, str] = {}


class _SettingsFile(TomlConfigSettingsSource):
    """The settings file: `Settings` is not given what a section of a package takes, or would take
    if its distribution were installed."""

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        others = found.keys() - Settings.model_fields.keys()
        if not others or self.settings_cls is not Settings:
            return found  # packages are looked for where the file has more than the core's
        taken = others & _names_of_sections()
        _ignored.clear()
        for distribution, names in OF_DISTRIBUTIONS.items():
            _ignored.update(dict.fromkeys(others.intersection(names) - taken, distribution))
        return {key: found[key] for key in found if key not in taken and key not in _ignored}


class _FileAndVariables(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            env_settings,
            _SettingsFile(settings_cls, toml_file=settings_file()),
        )


class SettingsSection(_FileAndVariables):
    """Settings of a package, as of `Settings`; `get_section` reads one."""

    model_config = SettingsConfigDict(
        env_prefix="TUNA_", extra="ignore", frozen=True, allow_inf_nan=False
    )


class Settings(_FileAndVariables):
    """Settings of one process; a variable's name is `TUNA_` and the upper-case field name."""

    model_config = SettingsConfigDict(
        env_prefix="TUNA_", extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False
    )

    home: Annotated[Path, BeforeValidator(named)] = Field(
        default_factory=_default_home,
        description="where the embedded database, Redis socket, artifacts and logs live",
    )
    db_url: SecretStr | None = Field(
        None, description="SQLAlchemy URL; default: SQLite file in TUNA_HOME"
    )
    redis_url: _ServerUrl | None = Field(
        None,
        validation_alias=AliasChoices("TUNA_REDIS_URL", "CELERY_RESULT_BACKEND"),
        description=(
            "Redis of results and leases; default: the broker if it is Redis, else embedded. "
            "CELERY_RESULT_BACKEND is honoured too"
        ),
    )
    broker_url: _ServerUrl | None = Field(
        None,
        validation_alias=AliasChoices("TUNA_BROKER_URL", "CELERY_BROKER_URL"),
        description="Celery broker; default: the embedded Redis. CELERY_BROKER_URL is honoured too",
    )
    artifacts_url: str | None = Field(
        None,
        description=(
            "fsspec URL of the artifact store; default for workers: the coordinator's; for it:"
            " Redis if one is configured, else in TUNA_HOME"
        ),
    )
    artifacts_mib: int = Field(
        1024,
        ge=1,
        description="memory limit of artifacts in Redis; at the limit compile workers wait",
    )
    cache_mib: int = Field(
        1024,
        ge=0,
        description=(
            "limit of the copies of artifacts that workers keep in TUNA_HOME; the least recently"
            " used are deleted first; 0: none; a store in a folder of this machine needs none"
        ),
    )
    artifacts_key: Annotated[SecretStr, AfterValidator(hex_key)] | None = Field(
        None,
        description=(
            "secret of the key that signs artifacts, in hex, for coordinators and own workers;"
            " default: the installation's, which `tuna key rotate` replaces"
        ),
    )
    worker_name: str = Field(
        "",
        description=(
            "name of the workers on this machine; default: the host's; set for workers that join"
        ),
    )
    gateway: SecretStr | None = Field(
        None,
        description=(
            "gateway that this remote worker takes work from, with its credentials; set for workers"
            " that join with a token"
        ),
    )
    eval_cpus: Annotated[str, NoDecode, AfterValidator(cpu_set)] = Field(
        "",
        description=(
            "cores that measure, such as 1 or 4-7, lent to builds while they do not; default: the"
            " last core"
        ),
    )
    quiet: Literal["yes", "no", "auto"] = Field(
        "no",
        description=(
            "whether this user's workers on this machine stop building while it measures: yes or"
            " no; auto, of earlier releases, is no"
        ),
    )
    rocm_path: Path = Field(Path("/opt/rocm"), description="where ROCm is installed")
    fin: Path | None = Field(
        None, description="the program fin, which tunes MIOpen; default: bin/fin of ROCm"
    )
    lease_s: float = Field(
        20.0, gt=1.0, description="seconds without a heartbeat after which a worker counts as lost"
    )
    shutdown_s: float = Field(
        30.0,
        ge=0.0,
        description="seconds that a worker has to finish its current chunk on a warm shutdown",
    )
    before_worker: Annotated[str, AfterValidator(command)] = Field(
        "",
        description=(
            "command line to run before a worker starts; if it fails, the worker does not start"
        ),
    )
    after_worker: Annotated[str, AfterValidator(command)] = Field(
        "", description="command line to run after a worker has ended, or while it is aside"
    )
    max_attempts: int = Field(
        3, ge=1, lt=2**31, description="failed attempts after which a job is errored"
    )
    claim_batch: int = Field(2000, ge=1, lt=2**31, description="jobs claimed in one transaction")
    policy: Annotated[str, AfterValidator(publishing_policy)] = Field(
        "auto",
        description=(
            "what a coordinator publishes next (docs/scheduling.md). auto: gradient for a single"
            " session that searches for layers of models, else fair"
        ),
    )
    queue_bound: int = Field(
        256, ge=1, lt=2**31, description="chunks that may wait in one queue (backpressure)"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = Field(
        "WARNING", description="level of the log on stderr"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="json: one object per line, with logstash's fields"
    )
    simulated: bool = Field(
        False,
        description=(
            "allow simulated measurements: the library noop and the stand-in for fin. Their results"
            " are marked, and golden versions refuse them"
        ),
    )
    sandbox: Literal["auto", "require", "off"] = Field(
        "auto",
        description=(
            "the box round what is built and measured. auto: as far as this kernel can; require:"
            " nothing runs where it cannot close it; off: none"
        ),
    )
    sandbox_read: str = Field(
        "",
        description=(
            "paths, separated by colons, that boxed programs may read too, such as a compiler's of"
            " your own"
        ),
    )
    sandbox_write: str = Field(
        "",
        description=(
            "paths that they may write too, such as /dev/shm for an OpenMP runtime that insists"
            " on it"
        ),
    )
    sandbox_memory_mib: int = Field(
        0,
        ge=0,
        description=(
            "memory of one such process; 0: what the library sets, for most 8192, else this"
            " machine's or container's"
        ),
    )
    sandbox_file_mib: int = Field(
        8192, ge=0, description="size of one file that it may write; 0: no limit"
    )
    sandbox_processes: int = Field(
        16384,
        ge=0,
        description=(
            "processes and threads of this user above which it can start no more (of root it is not"
            " enforced); 0: no limit"
        ),
    )

    @property
    def embedded_db(self) -> bool:
        """True if the database is the embedded SQLite file in TUNA_HOME."""
        return self.db_url is None

    @property
    def sql_url(self) -> str | URL:
        """The SQLAlchemy URL to use, secrets included: never print it."""
        if self.db_url is not None:
            return self.db_url.get_secret_value()
        from sqlalchemy import URL  # only where a database is used, for it takes a while

        return URL.create("sqlite", database=str(self.home / "tuna.sqlite"))

    @property
    def run_dir(self) -> Path:
        """Directory of sockets, locks and logs of running processes."""
        return self.home / "run"


_Section = TypeVar("_Section", bound=SettingsSection)
_AnySettings = TypeVar("_AnySettings", bound=BaseSettings)
_SECTIONS: Plugins[type[SettingsSection]] = Plugins("tuna.settings", "section of settings", type)
#: Sections with the settings of the process that they were read with
_sections_read: dict[type[SettingsSection], tuple[Settings, SettingsSection]] = {}


@functools.lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read once; raises BadInput with the name of an invalid setting,
    or if TUNA_HOME is not this user's alone."""
    found = _read(Settings)
    check_home(found.home)
    return found


def get_section(section: type[_Section]) -> _Section:
    """Return a package's settings of this process, read as often as `get_settings`; raises BadInput
    with the name of an invalid one."""
    settings = get_settings()
    read_with, found = _sections_read.get(section, (None, None))
    if read_with is not settings or not isinstance(found, section):
        found = _read(section)
        _sections_read[section] = settings, found
    return found


@contextlib.contextmanager
def changed_settings(values: Mapping[str, str]) -> Iterator[None]:
    """Change settings of this process and its children, by the names of their variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    get_settings.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        get_settings.cache_clear()


def setting_names() -> set[str]:
    """Return the names of all settings, those of installed packages too."""
    return _names_of_sections() | Settings.model_fields.keys()


def _names_of_sections() -> set[str]:
    return {name for section in _SECTIONS.all().values() for name in section.model_fields}


def _read(settings: type[_AnySettings]) -> _AnySettings:
    try:
        return settings()
    except ValidationError as error:
        raise BadInput(_invalid_setting(error.errors()[0])) from None
    except RecursionError:
        raise BadInput("The settings file cannot be read: it is nested too deeply.") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"The settings file cannot be read: {error}") from None


def ignored_settings() -> list[str]:
    """Return a sentence for each setting in the file whose distribution is not installed."""
    return [
        f"The settings file has {name}, which only {distribution} reads: it is not installed here"
        for name, distribution in sorted(_ignored.items())
    ]


#: Variables that are not settings
_OTHERS = ("TUNA_CONFIG", "TUNA_JOIN", "TUNA_EXAMPLE_PROGRAM")
_ALIKE = 0.88


def misspelt() -> dict[str, str]:
    """Unknown variables of this process that look like a setting's name, each with that
    name."""
    known = {f"TUNA_{name.upper()}" for name in Settings.model_fields}.union(_OTHERS)
    unknown = {name for name in os.environ if name.startswith("TUNA_") and name not in known}
    if unknown:
        others = _names_of_sections().union(*OF_DISTRIBUTIONS.values())
        known.update(f"TUNA_{name.upper()}" for name in others)
    found = {}
    for name in sorted(unknown):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
            if close:
                found[name] = close[0]
    return found


def _invalid_setting(fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        near = nearest(name, setting_names())
        return (
            f"The settings file has {name}, which is no"
            f" setting{f'; did you mean {near}?' if near else '.'}"
        )
    name = name if name.startswith(("TUNA_", "CELERY_")) else f"TUNA_{name.upper()}"
    return f"The setting {name} is not usable: {fault['msg'].removeprefix('Value error, ')}."

"""Settings of the service, beside the core's in the same variables and file."""

from __future__ import annotations

from pydantic import Field

from tuna.settings import SettingsSection, get_section


class ServiceSettings(SettingsSection):
    """Bounds on what visitors may ask for and share."""

    request_mib: int = Field(
        640,
        ge=1,
        le=1023,
        description=(
            "largest file of a request of the service; what imports a model needs a few times that"
            " memory"
        ),
    )
    submit_open: int = Field(8, ge=1, description="open requests of one token with the role submit")
    submit_trials: int = Field(
        100_000, ge=1, description="trials that the open requests of such a token may take together"
    )
    submit_mib: int = Field(
        4096, ge=1, description="uploads and results of such a token that are stored"
    )
    submit_priority: int = Field(
        5, ge=0, le=9, description="highest priority that such a token may ask for"
    )
    space_mib: int = Field(
        10_240,
        ge=1,
        description="entries of one space of the cache; the least used are evicted first",
    )
    space_token_mib: int = Field(
        4096, ge=1, description="entries that one token may have put into its space"
    )


def service_settings() -> ServiceSettings:
    """Return the settings of this process; raises BadInput with the name of an invalid one."""
    return get_section(ServiceSettings)

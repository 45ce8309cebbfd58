"""Settings of the service, beside the core's in the same variables and file."""

from __future__ import annotations

from pydantic import Field

from tuna.api import SettingsSection, get_section


class ServiceSettings(SettingsSection):
    """Bounds on what visitors may ask for and share."""

    request_mib: int = Field(
        640,
        ge=1,
        le=1023,
        description="largest file of a request of the service",
    )
    request_memory_mib: int = Field(
        2048,
        ge=1,
        description=(
            "memory of the process that imports, plans and links the model of a request, which"
            " needs a few times the file's size"
        ),
    )
    service_memory_mib: int = Field(
        4096,
        ge=1,
        description=(
            "the same of all requests that are worked on at a time, at least one; others wait"
            " their turn"
        ),
    )
    request_cpu_s: int = Field(
        300,
        ge=1,
        le=1_000_000,
        description=(
            "CPU seconds of one step of that process, such as the import, for each core that it"
            " uses"
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

    @property
    def requests_at_a_time(self) -> int:
        """Number of requests that are worked on at a time."""
        return max(1, self.service_memory_mib // self.request_memory_mib)


def service_settings() -> ServiceSettings:
    """Return the settings of this process; raises BadInput with the name of an invalid one."""
    return get_section(ServiceSettings)

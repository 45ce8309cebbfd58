"""The kind `miopen_problem`: a problem that a database of MIOpen's names and that no layer of Tuna
has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tuna.configs import problem_key
from tuna.configs.config import Config
from tuna.configs.kind import ConfigKind
from tuna.errors import BadInput


@dataclass(frozen=True)
class ProblemConfig(Config):
    """A key of a find db, kept as it is, so that an export has every line of the file that was
    imported.

    MIOpen ships results for tensors with casts, of different layouts or types, and even for sizes
    that are those of no convolution. No solver is tuned for such a problem.
    """

    kind: ClassVar[str] = "miopen_problem"

    problem: str  #: find-db key of the problem

    def __post_init__(self) -> None:
        problem_key.parse(self.problem)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> ProblemConfig:
        """The problem with this key; raises BadInput."""
        if not isinstance(values["problem"], str):
            raise BadInput("the problem of a miopen_problem config is the key of a find db")
        return cls(values["problem"])

    @property
    def label(self) -> str:
        """The find-db key."""
        return self.problem

    @property
    def flops(self) -> int:
        """0: the sizes may be those of no convolution."""
        return 0


KIND = ConfigKind(ProblemConfig)


def text_of(config: object) -> str | None:
    """The find-db key of a config; None if MIOpen has none, or none that is known for certain."""
    if isinstance(config, ProblemConfig):
        return config.problem
    key = problem_key.key_of(config)
    return None if key is None else key.text()

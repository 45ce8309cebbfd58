"""ORM models of all tables. Only Alembic creates them; a test compares the models with the migrations."""

from tuna.db.models.base import TABLE_OPTIONS, Base
from tuna.db.models.configs import (
    CONFIG_CHARS,
    BatchNormConfig,
    Config,
    ConfigTag,
    ConvConfig,
    Framework,
    GemmConfig,
    Model,
    ModelConfig,
)
from tuna.db.models.results import FindDb, FindDbKernel, Golden, GoldenEntry, GoldenKernel, Kernel
from tuna.db.models.work import (
    Device,
    Environment,
    Installation,
    Job,
    Session,
    Solver,
    SolverApplicability,
    StepResult,
    Token,
    Trial,
    Worker,
)

__all__ = [
    "CONFIG_CHARS",
    "TABLE_OPTIONS",
    "Base",
    "BatchNormConfig",
    "Config",
    "ConfigTag",
    "ConvConfig",
    "Device",
    "Environment",
    "FindDb",
    "FindDbKernel",
    "Framework",
    "GemmConfig",
    "Golden",
    "GoldenEntry",
    "GoldenKernel",
    "Installation",
    "Job",
    "Kernel",
    "Model",
    "ModelConfig",
    "Session",
    "Solver",
    "SolverApplicability",
    "StepResult",
    "Token",
    "Trial",
    "Worker",
]

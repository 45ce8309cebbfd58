"""Records of database files that can be imported into a session, by what names a layer there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tuna.configs.problem_key import PerfKey

#: Algorithm families of find dbs by lower-case name
FAMILIES = {name.lower(): name for name in ("GEMM", "Direct", "FFT", "Winograd", "ImplicitGEMM")}


@dataclass(frozen=True)
class FindItem:
    """One solver for a problem."""

    solver: str
    time_ms: float
    workspace_bytes: int
    algorithm: str  #: algorithm, such as miopenConvolutionFwdAlgoDirect

    @property
    def family(self) -> str:
        """The family of the algorithm; empty for an unknown one."""
        return FAMILIES.get(self.algorithm.partition("Algo")[2].lower(), "")


@dataclass(frozen=True)
class FindRecord:
    """A problem with its solvers, fastest first."""

    key: str
    items: tuple[FindItem, ...]


@dataclass(frozen=True)
class PerfRecord:
    """The params of one solver for one problem."""

    key: PerfKey
    solver: str
    params: str


class ImportedResult(NamedTuple):
    """A result of one layer, as most formats hold it."""

    config: str  #: `Config.text()` of the layer
    kind: str
    solver: str
    algorithm: str  #: algorithm as the library named it, else the family
    family: str  #: family of the solver
    params: str
    time_ms: float | None
    workspace_bytes: int
    simulated: bool  #: true if a stand-in timed it: such a result is not imported
    noisy: bool = False  #: true if the device was not quiet during the measurement
    clock: str = ""
    #: key of the config; a result whose key differs from that of `config` is left out; empty: not
    #: known
    config_key: str = ""
    #: target of the record, as `Exporter.target_name` has it; a result of another target than the
    #: session's is left out
    target: str = ""
    #: text of the problem, which is kept for exports; of a record without `config` the text by
    #: which a session of this database knows layer and solver
    workload: str = ""

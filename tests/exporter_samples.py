"""The samples and the tests that our own exporters share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builders import DRIVERS, workload

from tuna.configs import parse_line, problem
from tuna.exports.database_files import diff
from tuna.testing.exporter_contract import ExporterContract, SampleResult, sample_record

LAYERS = [parse_line(driver)[0] for driver in DRIVERS[:3]]
TIMES = {"ConvAsm3x3U": 0.5, "ConvWinograd<3-2>": 0.25, "=GemmFwdRest": 2.0}


class Ours(ExporterContract):
    """The samples and the tests that our own exporters share."""

    solvers: tuple[str, ...] = ("ConvAsm3x3U", "ConvWinograd<3-2>")

    def samples(self) -> Sequence[SampleResult]:
        """Each solver for each of three layers."""
        return [self.sample(layer, solver) for layer in LAYERS for solver in self.solvers]

    def sample(self, layer: Any, solver: str, **facts: Any) -> SampleResult:
        """One of them."""
        number = LAYERS.index(layer) * 10 + list(TIMES).index(solver)
        time_ms = TIMES[solver] * (1 + LAYERS.index(layer))
        record = sample_record(
            layer.driver(),
            solver,
            time_ms,
            config_key=layer.key,
            label=layer.label,
            job_id=number,
            **facts,
        )
        code = ((f"code {number} ".encode() * 99, "", ""),)
        return SampleResult(
            record, problem.text_of(layer), kernels=code, workload=workload(str(number))
        )

    def test_two_exports_of_the_same_do_not_differ(self, tmp_path: Path) -> None:
        one, other = (self.export(tmp_path / name).path for name in "ab")
        found = diff(one, other)
        assert not found.differs
        assert found.total("same") == len(self.expected())

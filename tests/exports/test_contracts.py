"""Every exporter keeps the contract that third parties' exporters are held to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builders import DRIVERS, schedule
from exporter_samples import LAYERS, TIMES, Ours

from tuna.configs import parse_line, problem_key
from tuna.exports.csv_table import CsvExporter
from tuna.exports.json_lines import JsonExporter
from tuna.libraries.exporter import Entry
from tuna.libraries.miopen.formats.exporters import FindExporter, KernelExporter, PerfExporter
from tuna.libraries.tvm import tvm_db
from tuna.libraries.tvm.tvm_db import TvmDatabaseExporter
from tuna.testing.exporter_contract import SampleResult, sample_record

FWD = "miopenConvolutionFwdAlgoDirect"


class TestFind(Ours):
    exporter = FindExporter()
    library = "miopen"

    def expected(self) -> Sequence[Entry]:
        """Times and workspaces by problem."""
        return [
            Entry(str(one.problem_key), one.record.solver, (one.record.time_ms or 0.0, 4096, FWD))
            for one in self.samples()
        ]


class TestPerf(Ours):
    exporter = PerfExporter()
    library = "miopen"

    def expected(self) -> Sequence[Entry]:
        """Params by perf key."""
        keys = [problem_key.parse(str(one.problem_key)).perf().text() for one in self.samples()]
        return [
            Entry(key, one.record.solver, ("1,2",))
            for key, one in zip(keys, self.samples(), strict=True)
        ]


class TestPerfText(TestPerf):
    options = {"text": True}  # noqa: RUF012


class TestKernel(Ours):
    exporter = KernelExporter()
    library = "miopen"

    def expected(self) -> Sequence[Entry]:
        """The code of the fastest solver of each layer."""
        found = []
        for layer in LAYERS:
            code = self.sample(layer, "ConvWinograd<3-2>").kernels[0][0]
            args = f"{layer.driver()} -DTUNA_ENVIRONMENT=0123456789abcdef -mcpu=gfx90a"
            digest = hashlib.md5(code, usedforsecurity=False).hexdigest()
            found.append(
                Entry(f"ConvWinograd<3-2>_{layer.key[:16]}.so.o", args, (digest, len(code)))
            )
        return found


class TestTvm(Ours):
    exporter = TvmDatabaseExporter()
    library = "tvm"

    def sample(self, layer: Any, solver: str, **facts: Any) -> SampleResult:
        """With a schedule, and a slower trial beside it."""
        found = super().sample(layer, solver, params=schedule(0))
        trial = (1, 2 * (found.record.time_ms or 0.0), schedule(1))
        return SampleResult(found.record, workload=found.workload, trials=(trial,))

    def expected(self) -> Sequence[Entry]:
        """The best of each layer and solver."""
        best = tvm_db.tuned_record(schedule(0), 1.0, "").schedule
        return [
            Entry(
                one.record.config,
                one.record.solver,
                (
                    (one.record.time_ms or 0.0) / 1000 * 1000,
                    best,
                    tvm_db.workload_text(one.workload or b""),
                ),
            )
            for one in self.samples()
        ]

    def test_the_slower_trial_is_a_record_too(self, tmp_path: Path) -> None:
        report = self.export(tmp_path)
        assert report.entries == 2 * len(self.samples())
        assert self.export(tmp_path, top=1).entries == len(self.samples())


class Generic(Ours):
    """Whole results: also of another kind of config, without a time, and with text that is hard to
    write."""

    solvers = tuple(TIMES)

    def samples(self) -> Sequence[SampleResult]:
        """Those of all, and some more."""
        gemm = parse_line(DRIVERS[5])[0]
        facts: dict[str, Any] = {
            "kind": gemm.kind,
            "config_key": gemm.key,
            "job_id": None,
            "trial_number": None,
        }
        facts |= {
            "worker": "",
            "device": "",
            "measured_at": None,
            "imported_from": "x.db sha256:0",
            "simulated": True,
        }
        odd = sample_record(
            gemm.driver(), "+Odd", 1.5, **facts, spread=None, params='a,"b"\r\n;\'=1\t\u20ac'
        )
        untimed = sample_record(
            gemm.driver(), "@Untimed", None, **{**facts, "imported_from": ""}, params=""
        )
        return [*super().samples(), SampleResult(odd), SampleResult(untimed)]

    def expected(self) -> Sequence[Entry]:
        """Every sample."""
        return [
            Entry(
                f"{one.record.config} on gfx90a with 104 CUs",
                one.record.solver,
                (
                    math.inf if one.record.time_ms is None else one.record.time_ms,
                    4096,
                    one.record.params,
                ),
            )
            for one in self.samples()
        ]

    def test_every_field_reads_back(self, tmp_path: Path) -> None:
        found = {
            (one.config, one.solver): one for one in self.exporter.read(self.export(tmp_path).path)
        }  # type: ignore[attr-defined]
        assert found == {
            (one.record.config, one.record.solver): one.record for one in self.samples()
        }

    def test_rows_stand_by_config_environment_time_and_solver(self, tmp_path: Path) -> None:
        rows = list(self.exporter.read(self.export(tmp_path).path))  # type: ignore[attr-defined]
        order = [
            (one.config_key, one.environment.key, one.time_ms or math.inf, one.solver)
            for one in rows
        ]
        assert order == sorted(order)

    def test_top_keeps_the_fastest_of_each_config(self, tmp_path: Path) -> None:
        report = self.export(tmp_path, top=1)
        assert (report.entries, report.configs) == (4, 4)
        fastest = {one.solver for one in self.exporter.read(report.path)}  # type: ignore[attr-defined]
        assert fastest == {"ConvWinograd<3-2>", "+Odd"}
        assert report.skipped == {"slower than the 1 fastest of its config": 7}


class TestJson(Generic):
    exporter = JsonExporter()

    def test_each_line_is_an_object_and_the_first_names_the_version(self, tmp_path: Path) -> None:
        first, *rest = map(json.loads, self.export(tmp_path).path.read_text().splitlines())
        assert first == {"format": "tuna-results", "version": 1}
        assert {line["solver"] for line in rest} == {*TIMES, "+Odd", "@Untimed"}


class TestCsv(Generic):
    exporter = CsvExporter()

    def test_no_cell_is_a_formula(self, tmp_path: Path) -> None:
        import csv

        with open(self.export(tmp_path).path, newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream))
        cells = [cell for row in rows for cell in row]
        assert "'=GemmFwdRest" in cells
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]

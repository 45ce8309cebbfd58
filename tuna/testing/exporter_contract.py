"""The contract of exporters as a pytest class: subclass `ExporterContract`, give an exporter and
sample results.

class TestMine(ExporterContract):
    exporter = MyExporter()

    def samples(self):
        return [SampleResult(sample_record("conv 1", "SolverA", 0.5)),
        SampleResult(sample_record(...)), ...]

    def expected(self):
        return [Entry("conv 1", "SolverA", (0.5,)), ...]
"""

from __future__ import annotations

import bz2
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from tuna.errors import BadInput, NotFound
from tuna.libraries import compressed
from tuna.libraries.exporter import Entry, Exporter, ExportReport, Pair
from tuna.libraries.imported_records import ImportedResult
from tuna.libraries.results import (
    KernelOf,
    ResultEnvironment,
    ResultRecord,
    SolverFacts,
    Spread,
    TrialRecord,
)
from tuna.vocabulary import BASELINE

Row = TypeVar("Row", bound=tuple[Any, ...])
_ENVIRONMENT = ResultEnvironment(
    "0123456789abcdef",
    "sample",
    "1.0",
    "gfx90a",
    104,
    "cc 13",
    "a card",
    "",
    {"threads": "1"},
    {"caches": "cold"},
)


@dataclass(frozen=True)
class SampleResult:
    """A result with what lies beside it in SQL."""

    record: ResultRecord
    problem_key: str | None = None
    tunable: bool = True
    workload: bytes | None = None
    #: code, name and arguments of each code object
    kernels: tuple[tuple[bytes, str, str], ...] = ()
    #: number, time in ms and params of other good trials
    trials: tuple[tuple[int, float, str], ...] = ()


def sample_record(config: str, solver: str, time_ms: float | None, **facts: Any) -> ResultRecord:
    """A record of a measured result with plausible facts, each of which can be given."""
    values: dict[str, Any] = {
        "config_key": hashlib.sha256(config.encode()).hexdigest(),
        "kind": "convolution",
        "config": config,
        "label": f"layer {config}",
        "solver": solver,
        "algorithm": "Direct",
        "family": "Direct",
        "params": "1,2",
        "time_ms": time_ms,
        "spread": None if time_ms is None else Spread(time_ms * 0.75, time_ms, time_ms * 0.5, 5),
        "max_error": None if time_ms is None else 2.5e-7,
        "workspace_bytes": 4096,
        "simulated": False,
        "noisy": True,
        "clock": "cpu",
        "environment": _ENVIRONMENT,
        "session_id": 3,
        "job_id": 7,
        "trial_number": 0,
        "worker": "eval@host",
        "device": "card 0",
        "measured_at": datetime(2026, 3, 2, 9, 30, 0, 250000, timezone.utc),
        "imported_from": None,
    }
    return ResultRecord(**(values | facts))


class Interrupted(Exception):
    """Raised by a `SampleSource` in the middle of its results."""


class SampleSource:
    """Results in memory as exporters are given them; see `results.ResultSource`."""

    def __init__(
        self, samples: Sequence[SampleResult], library: str, *, breaks: bool = False
    ) -> None:
        environment = samples[0].record.environment if samples else _ENVIRONMENT
        self.title, self.library, self.mixed = "Sample", library, False
        self.tag: str | None = None
        self.arch, self.num_cu = environment.arch, environment.num_cu
        self.target, self.toolchain = environment.target, environment.toolchain
        self.environment_key = environment.key
        facts = {
            SolverFacts(sample.record.solver, sample.record.family, sample.tunable): None
            for sample in sorted(samples, key=lambda sample: sample.record.solver)
        }
        self.solvers: Mapping[int, SolverFacts] = dict(enumerate(facts, 1))
        self._ids = {solver.name: number for number, solver in self.solvers.items()}
        self._samples, self._breaks = list(samples), breaks
        workloads = (sample.workload for sample in samples if sample.workload is not None)
        codes = (kernel[0] for sample in samples for kernel in sample.kernels)
        self._blobs = {_digest(data): data for data in (*workloads, *codes)}

    def results(self, row: type[Row], *, needs: str = "", ordered: bool = False) -> Iterator[Row]:
        """The fields that `row` names, in the order of the samples unless ordered."""
        found = [self._fields(number, sample) for number, sample in enumerate(self._samples, 1)]
        if needs:
            found = [fields for fields in found if fields[needs] is not None]
        if ordered:
            found.sort(key=lambda fields: str(fields[needs]).encode())
        names: tuple[str, ...] = row._fields  # type: ignore[attr-defined]  # of a NamedTuple
        return self._stream([row(*(fields[name] for name in names)) for fields in found])

    def records(self, n_best: int = 1, *, baselines: bool = False) -> Iterator[ResultRecord]:
        """Yield the samples in the total order; their own trials are no whole records."""
        found = [sample.record for sample in self._samples]
        tuned = {one.config_key for one in found if one.family != BASELINE}
        if not baselines:
            found = [o for o in found if o.family != BASELINE or o.config_key not in tuned]

        def order(record: ResultRecord) -> tuple[Any, ...]:
            return (
                record.config_key,
                record.environment.key,
                record.time_ms is None,
                record.time_ms,
                record.solver,
            )

        return self._stream(sorted(found, key=order))

    def trials(self) -> Iterator[TrialRecord]:
        """Yield the winner of each sample, and its other trials."""
        found = [
            trial
            for sample in self._samples
            if sample.record.job_id is not None
            for trial in _trials(sample)
        ]
        return self._stream(
            sorted(found, key=lambda one: (one.config_key, one.solver, one.job_id, one.number))
        )

    def kinds_without_key(self) -> Mapping[str, int]:
        """Count the samples without a key."""
        kinds = [sample.record.kind for sample in self._samples if sample.problem_key is None]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def kernels(self, result_ids: Iterable[int]) -> Iterator[KernelOf]:
        """Yield the kernels of the samples."""
        for result_id in result_ids:
            sample = self._samples[result_id - 1]
            record, key = sample.record, sample.record.environment.key
            which = (result_id, record.solver, record.config_key, record.config, key)
            for code, name, args in sample.kernels:
                yield KernelOf(*which, _digest(code), name, args)
            if not sample.kernels:
                yield KernelOf(*which, None, "", "")

    def blob(self, digest: str) -> bytes:
        """The code or workload of a sample, by its hash."""
        return self._blobs[digest]

    def good_trials(
        self, job_id: int, at_least_ms: float, limit: int
    ) -> list[tuple[int, float, str]]:
        """The fastest of the samples' trials."""
        found = [
            trial
            for sample in self._samples
            if sample.record.job_id == job_id
            for trial in sample.trials
            if trial[1] >= at_least_ms
        ]
        return sorted(found, key=lambda trial: (trial[1], trial[0]))[:limit]

    def _fields(self, number: int, sample: SampleResult) -> dict[str, Any]:
        record = sample.record
        same = ("config_key", "time_ms", "workspace_bytes", "params", "job_id", "trial_number")
        return {name: getattr(record, name) for name in (*same, "noisy")} | {
            "result_id": number,
            "driver": record.config,
            "problem_key": sample.problem_key,
            "problem": sample.problem_key or record.config,
            "solver_id": self._ids[record.solver],
            "algorithm": "" if record.algorithm == record.family else record.algorithm,
            "workload": None if sample.workload is None else _digest(sample.workload),
            "num_cu": record.environment.num_cu,
            "measured_at": None,
        }

    def _stream(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Yield the rows; where the source breaks, half of them before an error."""
        if self._breaks:
            yield from rows[: len(rows) // 2]
            raise Interrupted
        yield from rows


def _trials(sample: SampleResult) -> Iterator[TrialRecord]:
    record = sample.record
    which = (record.config_key, record.config, record.label, record.solver, record.job_id or 0)
    own = (record.trial_number or 0, record.time_ms, record.params)
    for number, time_ms, params in (own, *sample.trials):
        times = () if time_ms is None else (time_ms,)
        facts: dict[str, Any] = {"cause": "", "time_ms": time_ms, "times_ms": times}
        facts |= {"low_ms": None, "high_ms": None, "clock": record.clock, "ended_early": False}
        facts |= {"max_error": record.max_error, "build_s": 0.5, "measured_at": record.measured_at}
        yield TrialRecord(*which, number, params, **facts)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(path: Path) -> dict[str, bytes]:
    """The files of a database, which may be a directory, by name."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {
        str(file.relative_to(path.parent)): file.read_bytes() for file in files if file.is_file()
    }


class ExporterContract(ABC):
    """Subclass as `TestMine`; `samples` are results that all belong into the file, and `expected`
    what it then holds."""

    exporter: ClassVar[Exporter[Any]]
    options: ClassVar[Mapping[str, Any]] = {}  #: options of the variant that is tested
    library: ClassVar[str] = "sample"  #: name of the library whose results the samples are

    @abstractmethod
    def samples(self) -> Sequence[SampleResult]:
        """Three results or more, of two configs or more; their order must not matter."""

    @abstractmethod
    def expected(self) -> Sequence[Entry]:
        """The entries of a file that was written from the samples, in any order."""

    def export(
        self, directory: Path, samples: Sequence[SampleResult] | None = None, **options: Any
    ) -> ExportReport:
        """Write the samples, or others."""
        source = SampleSource(self.samples() if samples is None else samples, self.library)
        return self.exporter.export(
            source, directory, self.exporter.options_of({**self.options, **options})
        )

    def test_what_is_written_reads_back(self, tmp_path: Path) -> None:
        report = self.export(tmp_path)
        assert sorted(self.exporter.entries(report.path)) == sorted(self.expected())
        assert report.entries >= len(self.expected()) > 0
        assert 0 < report.configs <= report.entries

    def test_equal_results_give_equal_bytes_whatever_their_order(self, tmp_path: Path) -> None:
        samples = list(self.samples())
        assert len(samples) > 2, "fewer samples prove nothing about their order"
        orders = [samples, samples, samples[::-1], samples[1::2] + samples[::2]]
        written = [
            contents(self.export(tmp_path / str(n), order).path) for n, order in enumerate(orders)
        ]
        assert all(files == written[0] for files in written)
        assert any(written[0].values())

    def test_an_error_in_the_middle_leaves_the_older_file_and_nothing_else(
        self, tmp_path: Path
    ) -> None:
        before = contents(self.export(tmp_path).path)
        source = SampleSource(self.samples(), self.library, breaks=True)
        with pytest.raises(Interrupted):
            self.exporter.export(source, tmp_path, self.exporter.options_of(self.options))
        (only,) = tmp_path.iterdir()
        assert contents(only) == before

    def test_without_results_it_is_refused_and_nothing_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=f"no results for a {re.escape(self.exporter.title)}"):
            self.export(tmp_path / "new", [])
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("time_ms", [0.0, -1.0, float("inf")])
    def test_what_is_no_time_is_left_out_and_counted(self, tmp_path: Path, time_ms: float) -> None:
        bad = [
            replace(sample, record=sample.record._replace(time_ms=time_ms))
            for sample in self.samples()
        ]
        with pytest.raises(NotFound, match=r"\d left out: "):
            self.export(tmp_path / "new", bad)
        assert not (tmp_path / "new").exists()

    def test_no_key_and_solver_come_twice_so_that_equal_files_do_not_differ(
        self, tmp_path: Path
    ) -> None:
        one, other = (
            list(self.exporter.entries(self.export(tmp_path / name).path)) for name in "ab"
        )
        assert one == other
        assert len({entry[:2] for entry in one}) == len(one)

    def test_the_file_is_recognised_and_others_are_not(self, tmp_path: Path) -> None:
        path = self.export(tmp_path / "out").path
        assert self.exporter.recognises(path, b"" if path.is_dir() else compressed.head(path))
        for name, data in (
            ("empty", b""),
            ("text", b"nothing of the kind\n" * 9),
            ("zeros", bytes(5000)),
        ):
            (tmp_path / name).write_bytes(data)
            assert not self.exporter.recognises(tmp_path / name, data)
            if data:
                with pytest.raises(BadInput):
                    list(self.exporter.entries(tmp_path / name))

    def test_names_follow_the_device_or_the_user(self, tmp_path: Path) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_-]*", self.exporter.form)
        path = self.export(tmp_path).path
        assert path.name.endswith(tuple(self.exporter.endings))
        assert path.is_dir() == self.exporter.is_directory
        source, options = (
            SampleSource(self.samples(), self.library),
            self.exporter.options_of(self.options),
        )
        ending = self.exporter.ending(source, options)
        assert (
            self.exporter.export(source, tmp_path, options, "mine").path
            == tmp_path / f"mine{ending}"
        )
        for name in ("", ".", "..", "a/b"):
            with pytest.raises(BadInput, match="file name"):
                self.exporter.export(source, tmp_path, options, name)

    def test_an_option_that_it_does_not_have_is_refused_with_those_it_has(self) -> None:
        with pytest.raises(BadInput, match="no_such_option") as caught:
            self.exporter.options_of({"no_such_option": 1})
        assert all(name in caught.value.hint for name in self.exporter.options.model_fields)

    def test_packed_it_holds_the_same(self, tmp_path: Path) -> None:
        if "packed" not in self.exporter.options.model_fields:
            with pytest.raises(BadInput, match="packed"):
                self.export(tmp_path, packed=True)
            return
        plain, packed = self.export(tmp_path).path, self.export(tmp_path, packed=True).path
        assert packed.name == f"{plain.name}.bz2"
        assert bz2.decompress(packed.read_bytes()) == plain.read_bytes()
        assert self.exporter.recognises(packed, compressed.head(packed))
        assert list(self.exporter.entries(packed)) == list(self.exporter.entries(plain))

    def test_merged_with_itself_it_holds_the_same(self, tmp_path: Path) -> None:
        path = self.export(tmp_path).path
        found = sorted(self.exporter.entries(path))
        pairs = [Pair(entry.key, entry.solver, entry.value, entry.value) for entry in found]
        out = tmp_path / f"merged{path.name[path.name.index('.') :]}"
        if not self.exporter.mergeable:
            with pytest.raises(BadInput, match="cannot be merged"):
                self.exporter.write_merged(out, pairs, path, path, out.name)
            return
        with self.exporter.replacing(out) as temporary:
            self.exporter.write_merged(temporary, pairs, path, path, out.name)
        assert sorted(self.exporter.entries(out)) == found

    def test_what_can_be_imported_is_what_was_exported(self, tmp_path: Path) -> None:
        path = self.export(tmp_path).path
        if self.exporter.imports is None:
            with pytest.raises(BadInput, match="cannot be imported"):
                list(self.exporter.imported(path))
            return
        if self.exporter.imports is not ImportedResult:
            assert len(list(self.exporter.imported(path)))
            return
        found: dict[tuple[str, str, bool], float | None] = {}
        for one in self.exporter.imported(path):  # slower trials may follow
            found.setdefault((one.config, one.solver, one.simulated), one.time_ms)
        records = [sample.record for sample in self.samples()]
        assert found == pytest.approx(
            {(one.config, one.solver, one.simulated): one.time_ms for one in records}
        )

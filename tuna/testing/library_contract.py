"""The contract of `Library` as a pytest class.

    class TestMyLibrary(LibraryContract):
        job_options: ClassVar = {"candidates": 2}

        @pytest.fixture(scope="class")
        @classmethod
        def library(cls): return MyLibrary()

        @pytest.fixture(scope="class")
        @classmethod
        def configs(cls): return [GemmConfig(16, 16, 16)]

Sample jobs are taken through all steps once, with this machine's cores, and the tests look at what
came out.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tuna.configs import Config
from tuna.errors import BadInput, NotFound
from tuna.libraries import options as job_options
from tuna.libraries import registry
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.base import FINALS, Again, Library, Retry
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import Candidate, StepResult, WorkItem
from tuna.libraries.results import is_time
from tuna.libraries.steps import command_line, every_step, find_step, steps_to
from tuna.testing.rehearsal import Turn, rehearse, run_context
from tuna.vocabulary import SEARCH, Cause, Resource, canonical_name

#: Seconds by which the clocks of two processes may differ, with rounding
_SLACK_S = 0.1


class LibraryContract:
    """A subclass gives `library` and `configs`, at least one of which has a solver that
    succeeds."""

    job_options: ClassVar[Mapping[str, Any]] = {}  #: options of the sample jobs
    max_jobs: ClassVar[int] = 3  #: maximum of sample jobs, which are pairs of config and solver
    #: true if an entry point names the library, so that `tuna reproduce` finds it
    installed: ClassVar[bool] = True
    reproduce_timeout_s: ClassVar[float] = 240.0

    @pytest.fixture(scope="class")
    @classmethod
    def library(cls) -> Library:
        """The library; closed when its tests have ended."""
        raise NotImplementedError("a subclass says which library it tests")

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls) -> Sequence[Config]:
        """Sample configs, small: their jobs are run."""
        raise NotImplementedError("a subclass says which configs it tests with")

    @pytest.fixture(scope="class")
    @classmethod
    def context(cls, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
        """The context of a worker, with a store in a temporary folder."""
        return run_context(tmp_path_factory.mktemp("contract"))

    @pytest.fixture(scope="class")
    @classmethod
    def turns(
        cls, library: Library, configs: Sequence[Config], context: RunContext
    ) -> Iterator[list[Turn]]:
        """Everything that happened to the sample jobs."""
        yield rehearse(library, configs, context, cls.job_options, cls.max_jobs)
        library.close()

    def test_the_environment_is_stable(self, library: Library) -> None:
        """Two looks give the same: else a worker would refuse its own session."""
        first, second = library.environment(), library.environment()
        assert first == second
        assert first.key == second.key
        assert first.library == library.name
        assert toolchain_of(library) == first.toolchain != ""
        assert all(
            isinstance(name, str) and isinstance(value, str) for name, value in first.flags.items()
        )

    def test_solvers_are_distinct_and_have_canonical_names(self, library: Library) -> None:
        """A name is a key in databases, so `<3, 4>` is written `<3-4>`."""
        solvers = library.solvers()
        names = [solver.name for solver in solvers]
        assert names
        assert len(set(names)) == len(names)
        assert names == [canonical_name(name) for name in names]
        assert all(0 < len(name) <= 128 for name in names)
        assert all(solver.kinds and set(solver.kinds) <= set(library.kinds) for solver in solvers)
        assert list(library.solvers()) == list(solvers)

    def test_each_config_is_answered_once_with_solvers_of_its_kind(
        self, library: Library, configs: Sequence[Config]
    ) -> None:
        """Whatever the order; a config without a solver has an empty answer."""
        kinds = {solver.name: solver.kinds for solver in library.solvers()}
        found = list(library.applicable(iter(configs), library.environment()))
        assert sorted(config.key for config, _ in found) == sorted(config.key for config in configs)
        for config, names in found:
            assert names is not None, f"applicable() has no answer for {config.label}"
            unknown = set(names) - set(kinds)
            assert not unknown, (
                f"applicable() names solvers that solvers() does not have: {unknown}"
            )
            assert len(set(names)) == len(names)
            assert all(config.kind in kinds[name] for name in names)
        assert any(names for _, names in found), (
            "no sample config has a solver, so nothing can be tested"
        )

    def test_no_configs_have_no_answers(self, library: Library) -> None:
        """No configs are no error."""
        assert list(library.applicable([], library.environment())) == []

    def test_steps_have_names_limits_and_a_way(self, library: Library, turns: list[Turn]) -> None:
        """Names are distinct; limits are positive; `path_to` a step ends with it."""
        names = [step.name for step in library.steps]
        assert names
        assert len(set(names)) == len(names)
        for step in library.steps:
            assert step.chunk >= 1
            assert 0 < step.time_limit_s < math.inf
            assert find_step(library, step.name) is step
            path = list(steps_to(library, step.name))
            assert path[-1:] == [step.name]
            assert set(path) <= set(names)
        if library.search is not None:
            assert library.search.step.resource is Resource.CPU
            assert library.search.step.name == SEARCH
            assert find_step(library, SEARCH) is library.search.step
            assert library.search.step.name not in names
        if library.finals is not None:
            assert library.finals.step.resource is Resource.DEVICE
            assert find_step(library, FINALS) is library.finals.step
            assert FINALS not in names
        for turn in turns:
            assert all(0 < library.time_limit_s(turn.step, item) < math.inf for item in turn.items)
        with pytest.raises(NotFound):
            find_step(library, "no such step")

    @pytest.mark.parametrize("cause", Cause)
    def test_each_cause_has_a_retry(self, library: Library, cause: Cause) -> None:
        """A policy that can be followed."""
        for step in every_step(library):
            retry = step.retry(cause)
            assert isinstance(retry, Retry)
            assert isinstance(retry.again, Again)
            assert all(0 <= retry.wait_s(failures) < math.inf for failures in (1, 2, 10))

    def test_job_options_are_described_and_checked(self, library: Library) -> None:
        """`tuna solvers LIBRARY --options` shows each with its meaning; what is not known is
        refused."""
        for name, kind, _, meaning in job_options.describe(library.options):
            assert kind, f"the type of {name} cannot be shown"
            assert meaning, f"{name} has no description"
        assert (
            job_options.check(library.options, self.job_options, library.name) == self.job_options
        )
        with pytest.raises(BadInput):
            job_options.check(library.options, {"no_such_option": 1}, library.name)

    def test_a_probe_answers_in_words(self, library: Library) -> None:
        """Empty: the device answers."""
        assert isinstance(library.device.probe(DeviceHandle(id="cpu0", cpus=(0,))), str)

    def test_a_step_raises_nothing(self, turns: list[Turn]) -> None:
        """A candidate's fault is a failed trial, a job's fault a failed result."""
        assert turns, "no job was run"
        assert [turn.error for turn in turns if turn.error] == []

    def test_each_item_has_one_result(self, turns: list[Turn]) -> None:
        """Results come in any order; none is missing, doubled or of a job that was not given."""
        for turn in turns:
            assert sorted(result.job_id for result in turn.results) == sorted(
                item.job_id for item in turn.items
            )

    def test_results_name_the_attempt_and_the_step(self, turns: list[Turn]) -> None:
        """A result of another attempt would be dropped."""
        for item, result in _pairs(turns):
            assert (result.attempt, result.step) == (item.attempt, item.step)

    def test_a_result_is_good_or_has_a_cause(self, turns: list[Turn]) -> None:
        """A result is never both, never neither."""
        for _, result in _pairs(turns):
            assert result.ok is (result.cause is None)

    def test_some_job_succeeds_in_every_step(self, library: Library, turns: list[Turn]) -> None:
        """Otherwise the other tests would prove little."""
        done = {(result.job_id, result.step) for _, result in _pairs(turns) if result.ok}
        jobs = {job for job, _ in done}
        wanted = {step.name for step in library.steps if any(turn.step is step for turn in turns)}
        tails = [result.output_tail for _, result in _pairs(turns) if not result.ok]
        assert any({(job, name) for name in wanted} <= done for job in jobs), tails

    def test_trials_have_an_index_each_and_an_outcome(
        self, library: Library, turns: list[Turn]
    ) -> None:
        """A failed trial has a cause and no time; of a good measured item at least one trial is
        good. No result has more than the job may report."""
        for item, result in _pairs(turns):
            most = job_options.read(library.options, item.options).max_trials
            assert len(result.trials) <= most
            indices = [trial.index for trial in result.trials]
            assert len(set(indices)) == len(indices)
            assert all(trial.time_ms is None for trial in result.trials if trial.cause)
            if result.ok and result.trials:
                assert any(trial.cause is None for trial in result.trials)

    def test_times_are_positive_and_finite(self, turns: list[Turn]) -> None:
        """A time is from 1 ns to a day, and `time_ms` lies between the least and the greatest of
        the repeats."""
        for _, result in _pairs(turns):
            for trial in result.trials:
                assert all(map(is_time, trial.times_ms))
                if trial.time_ms is not None:
                    assert is_time(trial.time_ms)
                    assert not trial.times_ms or min(trial.times_ms) <= trial.time_ms <= max(
                        trial.times_ms
                    )

    def test_an_item_took_no_longer_than_from_its_start_to_its_end(self, turns: list[Turn]) -> None:
        """Moments are the worker's clock, in seconds since the epoch."""
        for _, result in _pairs(turns):
            assert 0 < result.started_at <= result.ended_at
            assert result.busy_s <= result.ended_at - result.started_at + _SLACK_S

    def test_artifacts_are_in_the_store(self, turns: list[Turn], context: RunContext) -> None:
        """Each that a result names can be had by its hash."""
        for _, result in _pairs(turns):
            named = [trial.artifact for trial in result.trials] + [result.workload]
            named += [code.artifact for code in result.kernels or ()]
            assert [
                digest for digest in filter(None, named) if not _is_there(context, digest)
            ] == []

    def test_an_artifact_that_is_gone_sends_the_job_back(
        self, library: Library, turns: list[Turn], context: RunContext
    ) -> None:
        """The cause of a step on the device is `artifact_lost`, so that it is compiled again."""
        for turn in (turn for turn in turns if turn.step.resource is Resource.DEVICE):
            for item in [item for item in turn.items if any(c.artifact for c in item.candidates)][
                :1
            ]:
                lost = tuple(Candidate(index=c.index, artifact="0" * 64) for c in item.candidates)
                (result,) = library.run(
                    turn.step, [item.model_copy(update={"candidates": lost})], context
                )
                assert (result.ok, result.cause) == (False, Cause.ARTIFACT_LOST)

    def test_items_are_left_as_they_were(self, turns: list[Turn]) -> None:
        """They are shared with the worker, which needs them after a fault."""
        for turn in turns:
            assert [item.model_dump_json() for item in turn.items] == list(turn.before)

    def test_results_travel_as_json(self, turns: list[Turn]) -> None:
        """A result read from its JSON equals the one that was written."""
        for _, result in _pairs(turns):
            assert StepResult.model_validate_json(result.model_dump_json()) == result

    def test_no_items_have_no_results(self, library: Library, context: RunContext) -> None:
        """No items are no error."""
        for step in library.steps:
            assert list(library.run(step, [], context)) == []

    def test_what_is_measured_names_its_device(self, turns: list[Turn]) -> None:
        """A time without a device cannot be compared with another."""
        for turn in turns:
            for result in turn.results if turn.step.resource is Resource.DEVICE else []:
                timed = any(trial.time_ms is not None for trial in result.trials)
                assert result.device is not None or not timed

    def test_reproduce_is_one_command_line(self, library: Library, turns: list[Turn]) -> None:
        """A shell splits it into the words that it was made of, with or without a candidate."""
        for item in (item for turn in turns for item in turn.items):
            for index in (None, 0):
                line = command_line(library, item, index)
                words = shlex.split(line)
                assert words[:2] == ["tuna", "reproduce"]
                assert shlex.join(words) == line
                assert "\n" not in line

    def test_the_command_line_repeats_the_job_when_pasted(
        self, library: Library, turns: list[Turn], tmp_path: Path
    ) -> None:
        """The first job that succeeded, through its steps, in another process."""
        if not self.installed:
            assert library.name not in registry.names()
            return
        item = _last_good(turns)
        words = shlex.split(command_line(library, item))
        done = subprocess.run(
            [sys.executable, "-m", "tuna", *words[1:], "--json"],
            env={"TUNA_HOME": str(tmp_path), **os.environ},
            capture_output=True,
            text=True,
            timeout=self.reproduce_timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        results = [StepResult.model_validate(result) for result in json.loads(done.stdout)]
        assert [result.step for result in results] == list(steps_to(library, item.step))
        assert all(result.ok for result in results)

    def test_it_can_be_closed_twice(self, library: Library, turns: list[Turn]) -> None:
        """More than one owner may close it at the end."""
        library.close()
        library.close()


def _pairs(turns: Sequence[Turn]) -> list[tuple[WorkItem, StepResult]]:
    return [pair for turn in turns for pair in turn.pairs()]


def _is_there(context: RunContext, digest: str) -> bool:
    try:
        context.artifacts.get(digest)
    except KeyError:
        return False
    return True


def _last_good(turns: Sequence[Turn]) -> WorkItem:
    good = [item for item, result in _pairs(turns) if result.ok]
    assert good, "no job succeeded"
    return good[-1]

"""Job options are checked where a person types them, and forgiven where an older version stored
them."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tuna.errors import BadInput
from tuna.libraries import options
from tuna.libraries.candidates import CandidateOptions
from tuna.libraries.items import WorkItem
from tuna.libraries.miopen.library import MiopenLibrary, MiopenOptions
from tuna.libraries.options import JobOptions
from tuna.libraries.registry import get_library, names
from tuna.libraries.steps import find_step
from tuna.libraries.tvm.library import TvmLibrary
from tuna.testing.noop import NoopOptions

REFUSED: list[tuple[type[JobOptions], dict[str, Any], str]] = [
    (MiopenOptions, {"timeout_s": "2h"}, "timeout_s cannot be so"),
    (MiopenOptions, {"timeout_s": 0}, "timeout_s cannot be so"),
    (MiopenOptions, {"timeout_s": float("nan")}, "timeout_s cannot be so"),
    (MiopenOptions, {"nosuch": 1}, "nosuch is not known"),
    (MiopenOptions, {"candidates": 8}, "candidates is not known"),
    (CandidateOptions, {"candidates": 999_999_999_999}, "candidates cannot be so"),
    (CandidateOptions, {"build_timeout_s": -1}, "build_timeout_s cannot be so"),
    (NoopOptions, {"sleep_s": float("inf")}, "sleep_s cannot be so"),
    (JobOptions, {"nosuch": 1}, "nosuch is not known"),
]


@pytest.mark.parametrize(("model", "given", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_with_what_there_is(
    model: type[JobOptions], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words) as error:
        options.check(model, given, "somelib")
    for name in model.model_fields:
        assert name in error.value.hint
    assert "tuna solvers somelib --options" in error.value.hint


def test_what_is_not_given_stays_out_of_the_database() -> None:
    assert options.check(CandidateOptions, {"build_timeout_s": 5}, "tvm") == {
        "build_timeout_s": 5.0
    }
    assert options.check(NoopOptions, {"fail": 7}, "noop") == {"fail": "7"}, (
        "one cannot type a text of digits otherwise"
    )


@pytest.mark.parametrize("name", names())
def test_every_option_has_a_type_and_a_meaning(name: str) -> None:
    for option, kind, _, meaning in options.describe(get_library(name).options):
        assert kind, option
        assert meaning, option


def test_what_an_older_version_stored_is_used_as_far_as_it_can_be() -> None:
    stored = {"candidates": 3, "build_timeout_s": "2h", "gone": [1]}
    with capture_logs() as lines:
        for _ in range(3):
            assert options.read(CandidateOptions, stored) == CandidateOptions(candidates=3)
    (line,) = lines
    assert line["options"] == {"build_timeout_s": "2h", "gone": [1]}
    assert options.read(CandidateOptions, {}) == CandidateOptions()


def _item(step: str, **given: Any) -> WorkItem:
    facts = {
        "job_id": 1,
        "attempt": 1,
        "session_id": 1,
        "library": "x",
        "solver": "s",
        "config": {},
    }
    return WorkItem(step=step, options=given, **facts)


def test_a_users_limit_is_the_limit() -> None:
    """Celery does not kill a worker after 3,630 s whose job has `timeout_s=14400`."""
    library = MiopenLibrary()
    step = find_step(library, "miopen_find_eval")
    assert library.time_limit_s(step, _item(step.name)) == 600.0
    assert library.time_limit_s(step, _item(step.name, timeout_s=14_400)) == 28_800.0


def test_a_search_of_many_candidates_has_time_for_each() -> None:
    library = TvmLibrary()
    compile_, eval_ = library.steps
    assert library.time_limit_s(compile_, _item("compile")) == compile_.time_limit_s
    assert (
        library.time_limit_s(compile_, _item("compile", candidates=100, build_timeout_s=600))
        > 60_000
    )
    assert library.time_limit_s(eval_, _item("eval", candidates=1000)) > 30_000

"""A worker tunes a function of a model by the text in the artifact store."""

from __future__ import annotations

import hashlib

import pytest
from tvm_bench import Bench

from tuna.configs import TaskConfig
from tuna.libraries.items import WorkItem
from tuna.vocabulary import Cause

# a bench is for a module, and starts its processes when they are needed
pytestmark = pytest.mark.keeps_processes


def item(bench: Bench, body: bytes) -> WorkItem:
    digest = hashlib.sha256(body).hexdigest()
    task = TaskConfig(name="softmax", body=digest)
    return bench.item(task, "TvmFunction", candidates=3).model_copy(update={"body": digest})


def test_a_function_whose_text_is_gone_is_no_fault_of_the_job(bench: Bench) -> None:
    for step in ("compile", "eval"):
        result = bench.run(item(bench, b"gone").model_copy(update={"step": step}))
        assert (result.ok, result.cause) == (False, Cause.ARTIFACT_LOST)

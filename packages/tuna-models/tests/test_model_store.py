"""Imported models in SQL and in the artifact store, and what goes with them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs

from tuna.api.services import artifacts_of_models
from tuna.configs import ConvConfig, TaskConfig
from tuna.configs.model import WholeModelConfig
from tuna.db import configs
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.models import ConfigRow, Job
from tuna.errors import BadInput, NotFound
from tuna_models.manifest import Manifest, ManifestTask
from tuna_models.work import model_job, store


def manifest(*tasks: TaskConfig, **facts: Any) -> Manifest:
    """Of a model with these tasks."""
    entries = tuple(
        ManifestTask(config=task.to_json(), count=number) for number, task in enumerate(tasks, 1)
    )
    said = {"file": "0" * 64, "size_bytes": 1, "opset": "17", "shapes": {}, "text": "1" * 64}
    said |= {"target": '{"kind":"llvm"}', "tvm": "0.27", "inputs": ()}
    return Manifest(**(said | facts), tasks=entries)


TASKS = [
    TaskConfig(core=ConvConfig(1, 8, 6, 6, 8, size, size), layouts="native") for size in (1, 3, 5)
]


@pytest.mark.usefixtures("home")
def test_models_share_tasks_and_the_latest_import_of_a_name_counts() -> None:
    with writing(open_database()) as connection:
        assert store.save(connection, "a", manifest(*TASKS[:2]), {}).added == 2
        assert store.save(connection, "b", manifest(*TASKS[1:]), {}).added == 1
        store.save(connection, "a", manifest(TASKS[2]), {})
    with reading(open_database()) as connection:
        latest, first = (
            store.find(connection, "a"),
            store.find(connection, f"a@{manifest(*TASKS[:2]).digest[:9]}"),
        )
        assert [entry.task for entry in latest.manifest.tasks] == TASKS[2:]
        assert [entry.task for entry in first.manifest.tasks] == TASKS[:2]
        assert list(configs.tagged(connection, first.tag)) == TASKS[:2]
        assert store.counts(connection, first) == {TASKS[0].key: 0, TASKS[1].key: 1}
        with pytest.raises(NotFound, match="Unknown model 'c'") as missing:
            store.find(connection, "c")
    assert missing.value.hint.startswith("models: a, b;")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("measured", [False, True])
def test_a_forgotten_import_takes_what_only_it_has_unless_it_was_measured(measured: bool) -> None:
    whole = WholeModelConfig(
        manifest(*TASKS[1:]).digest, "{}", hashlib.sha256(b"x").hexdigest(), "p", "a"
    )
    make_jobs(open_database(), 1, solvers=["Noop0"])
    with writing(open_database()) as connection:
        store.save(connection, "a", manifest(*TASKS[:2]), {})
        additions = store.save(connection, "b", manifest(*TASKS[1:]), {})
        model = store.find(connection, "b")
        if measured:
            body = {whole.body: b"x"}
            stored = configs.store(connection, [whole], model.tag, bodies=body)
            connection.execute(sa.update(Job).values(config_id=stored.ids[0]))
        assert store.forget(connection, model, additions) is not measured
        names = [one.name for one in store.list_all(connection)]
        assert names == (["b", "a"] if measured else ["a"])
        keys = set(connection.execute(sa.select(ConfigRow.key)).scalars())
        assert [task.key in keys for task in TASKS] == [True, True, measured]
        assert store.counts(connection, store.find(connection, "a"))[TASKS[1].key] == measured


@pytest.mark.usefixtures("home")
def test_the_program_of_a_build_goes_with_its_job_unless_another_needs_it() -> None:
    store_, body = artifacts_of_models(), hashlib.sha256(b"x").hexdigest()
    program, answers, others = (store_.put(name) for name in (b"program", b"answers", b"others"))
    mine = WholeModelConfig("mine", "{}", body, program, answers)
    other = WholeModelConfig("other", "{}", body, program, others)
    make_jobs(open_database(), 2, solvers=["Noop0"])

    def end_and_remove(config_id: int | None) -> list[bool]:
        with writing(open_database()) as connection:
            ended = sa.update(Job).where(Job.config_id == config_id).values(state="evaluated")
            connection.execute(ended)
        model_job._remove_data("mine@1")
        return [store_.is_whole(digest) for digest in (program, answers, others)]

    with writing(open_database()) as connection:
        ids = [
            configs.store(connection, [config], f"{config.name}@1", bodies={body: b"x"}).ids[0]
            for config in (mine, other)
        ]
        numbers = connection.execute(sa.select(Job.id)).scalars().all()
        for number, config_id in zip(numbers, ids, strict=True):
            connection.execute(sa.update(Job).where(Job.id == number).values(config_id=config_id))
    assert end_and_remove(None) == [True, True, True]
    assert end_and_remove(ids[0]) == [True, False, True]
    assert end_and_remove(ids[1]) == [False, False, True]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", ["", "a@b", "x" * 116])
def test_a_name_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(BadInput), writing(open_database()) as connection:
        store.save(connection, name, manifest(TASKS[0]), {})

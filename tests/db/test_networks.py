"""Models, frameworks, weights, tags: what an import says about the layers."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tuna.configs import GemmConfig
from tuna.db import configs, networks
from tuna.db.engine import reading, writing
from tuna.db.models import ConfigTag, ModelConfig
from tuna.db.networks import Named
from tuna.errors import BadInput, NotFound

LAYERS = [GemmConfig(m=1, n=1, k=number) for number in (1, 2, 3)]


def test_a_name_may_have_many_versions_and_is_added_once(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        assert networks.add_model(connection, Named("It's a 'net'", "1.5rc2"))
        assert not networks.add_model(connection, Named("It's a 'net'", "1.5rc2"))
        assert networks.add_model(connection, Named("It's a 'net'", "2"))
        assert networks.add_framework(connection, Named("Pytorch", "1"))
        assert networks.add_framework(connection, Named("Pytorch", "2"))
        assert [str(model) for model, _ in networks.models(connection)] == [
            "It's a 'net' 1.5rc2",
            "It's a 'net' 2",
        ]
        assert len(networks.frameworks(connection)) == 2


@pytest.mark.parametrize(
    "item", [Named("", "1"), Named("x", " "), Named("x" * 129, "1"), Named("x", "1" * 65)]
)
def test_what_is_no_name_is_refused(engine: sa.Engine, item: Named) -> None:
    with pytest.raises(BadInput), writing(engine) as connection:
        networks.add_model(connection, item)


def test_a_network_that_was_not_added_is_named_with_those_that_were(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        networks.add_model(connection, Named("Resnet50", "1"))
        networks.add_framework(connection, Named("Pytorch", "1"))
    with pytest.raises(NotFound, match="Resnet50 2") as error, reading(engine) as connection:
        networks.ids(connection, Named("Resnet50", "2"), Named("Pytorch", "1"))
    assert "Resnet50 1" in error.value.hint


def test_weights_are_set_not_summed(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        networks.add_model(connection, Named("Resnet50", "1"))
        networks.add_framework(connection, Named("Pytorch", "1"))
        ids = networks.ids(connection, Named("Resnet50", "1"), Named("Pytorch", "1"))
        stored = configs.store(connection, LAYERS, "t")
        weights = dict(zip((i for i in stored.ids if i is not None), (1, 2, 3), strict=True))
        networks.set_weights(connection, *ids, 1, weights)
        networks.set_weights(connection, *ids, 1, weights)
        networks.set_weights(connection, *ids, 8, weights)
        found = connection.execute(
            sa.select(ModelConfig.gpu_count, sa.func.sum(ModelConfig.weight)).group_by("gpu_count")
        )
        assert sorted(map(tuple, found)) == [(1, 6), (8, 6)]
        assert [count for _, count in networks.models(connection)] == [3]


def test_tag_only_adds_nothing_and_counts_what_is_missing(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        configs.store(connection, LAYERS[:2], "old")
        found = configs.store(connection, LAYERS, "new", tag_only=True)
        assert (found.added, found.tagged, found.missing) == (0, 2, 1)
        assert list(configs.tagged(connection, "new")) == LAYERS[:2]


def test_the_recurrent_mark_is_set_and_never_taken_away(engine: sa.Engine) -> None:
    def marks() -> list[bool]:
        statement = sa.select(ConfigTag.recurrent).order_by(ConfigTag.config_id)
        return [bool(mark) for mark in connection.execute(statement).scalars()]

    with writing(engine) as connection:
        configs.store(connection, LAYERS, "t")
        assert marks() == [False] * 3
        assert configs.store(connection, LAYERS[:1], "t", recurrent=True).tagged == 0
        configs.store(connection, LAYERS, "t")
        assert marks() == [True, False, False]

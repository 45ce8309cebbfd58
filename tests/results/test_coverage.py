"""How much of a model, network or tag has results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import START, DatabaseBuilder, memory

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig
from tuna.db import models, networks
from tuna.errors import BadInput, NotFound
from tuna.results.best import Cover, Scope
from tuna.results.coverage import coverage

CONV = ConvConfig(1, 64, 28, 28, 64, 3, 3, 1, 1)
WIDER, POINTWISE = (
    replace(CONV, out_channels=128),
    replace(CONV, fil_h=1, fil_w=1, pad_h=0, pad_w=0),
)
TASK = TaskConfig(core=CONV, layouts="native", epilogue=("bias",))
LARGER = replace(TASK, core=replace(CONV, batchsize=8))
OTHER = replace(TASK, epilogue=("bias", "relu"))
WEIGHTS: dict[Config, int] = {CONV: 2, WIDER: 3, POINTWISE: 1, TASK: 4, LARGER: 5, OTHER: 5}


@pytest.fixture
def build() -> DatabaseBuilder:
    """A network of a few layers, two of which have results on znver5."""
    made = DatabaseBuilder(memory().connect())
    networks.add_model(made.connection, networks.Named("net", "1"))
    networks.add_framework(made.connection, networks.Named("onnx", "17"))
    weights = {made.config(layer, tag="mine"): weight for layer, weight in WEIGHTS.items()}
    networks.set_weights(made.connection, 1, 1, 1, weights)
    session, solver = made.session(), made.solver("Direct")
    made.winner(session, made.config(CONV), solver, 2.0)
    made.winner(session, made.config(CONV), made.solver("Fast"), 1.0, noisy=True)
    made.winner(session, made.config(TASK), solver, 0.5)
    made.winner(session, made.config(POINTWISE), solver, 0.5, simulated=True)
    made.session(arch="znver4")
    return made


def test_layers_count_as_often_as_the_network_has_them(build: DatabaseBuilder) -> None:
    found = coverage(build.connection, "net", Scope("znver5"))
    assert found.subject == "model net 1"
    assert {one.layer: (one.cover, one.near) for one in found.layers} == {
        OTHER.label: (Cover.NONE, ""),
        POINTWISE.label: (Cover.NONE, ""),
        LARGER.label: (Cover.NEAR, TASK.label),
        WIDER.label: (Cover.NEAR, CONV.label),
        TASK.label: (Cover.EXACT, ""),
        CONV.label: (Cover.EXACT, ""),
    }
    assert [one.weight for one in found.layers] == [5, 1, 5, 3, 4, 2]
    assert found.shares == {Cover.EXACT: 6 / 20, Cover.NEAR: 8 / 20, Cover.NONE: 6 / 20}
    assert sum(found.work_shares.values()) == pytest.approx(1)
    assert found.work_shares[Cover.NEAR] > found.shares[Cover.NEAR], "they are larger"
    (best,) = [one for one in found.layers if one.layer == CONV.label]
    assert (best.solver, best.time_ms, best.noisy) == ("Fast", 1.0, True)


def test_layers_of_a_tag_count_once_and_golden_entries_cover_too(build: DatabaseBuilder) -> None:
    golden = build.insert(
        models.Golden, library="tvm", version=1, state="promoted", created_at=START
    )
    entry = {
        "golden_id": golden,
        "arch": "znver5",
        "num_cu": 2,
        "session_id": 1,
        "environment_id": 1,
        "time_ms": 0.1,
    }
    entry |= {"workspace_bytes": 0, "params": "", "algorithm": "", "worker": "", "device": ""}
    build.insert(models.GoldenEntry, config_id=build.config(POINTWISE), solver_id=1, **entry)
    found = coverage(build.connection, "mine", Scope("znver5"))
    assert found.subject == "tag mine"
    assert len(found.of(Cover.EXACT)) == 3
    assert found.shares[Cover.EXACT] == 3 / 6


def test_what_is_like_nothing_is_not_near(build: DatabaseBuilder) -> None:
    build.config(GemmConfig(8, 8, 8), tag="products")
    found = coverage(build.connection, "products", Scope("znver5"))
    assert found.as_json()["layers_by_cover"] == {"exact": 0, "near": 0, "none": 1}


def test_another_device_covers_nothing(build: DatabaseBuilder) -> None:
    assert coverage(build.connection, "net", Scope("znver4")).shares[Cover.NONE] == 1
    assert coverage(build.connection, "net", Scope("znver5", "epyc", "tvm")).shares[Cover.EXACT] > 0
    for arch, device in (("gfx90a", None), ("znver5", "ryzen")):
        with pytest.raises(NotFound, match="No session was tuned") as error:
            coverage(build.connection, "net", Scope(arch, device))
        assert error.value.hint == "architectures: znver4, znver5"


def test_the_only_architecture_that_was_tuned_for_need_not_be_named(build: DatabaseBuilder) -> None:
    with pytest.raises(BadInput, match="several architectures") as error:
        coverage(build.connection, "net", Scope())
    assert error.value.hint == "name one with --arch: znver4, znver5"
    build.session("onednn")
    assert coverage(build.connection, "net", Scope(library="onednn")).arch == "znver5"


def test_a_name_that_is_neither_a_model_nor_a_tag_is_an_error(build: DatabaseBuilder) -> None:
    with pytest.raises(NotFound, match="Unknown model or tag 'x'"):
        coverage(build.connection, "x", Scope("znver5"))

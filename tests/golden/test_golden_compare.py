"""Comparison of a version or a session with a version: faster, slower, new and missing layers; the
promotion gate."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from golden_scene import ASM, GEMM, A, B, C, D, Scene

from tuna.db import models
from tuna.errors import BadInput, NotFound
from tuna.golden import ResultsChanged, build, check_gate, compare
from tuna.golden.compare import ModelTally, PromotionReport

pytestmark = pytest.mark.both_databases_in_drills

WINO = "ConvBinWinogradRxSf2x3g1"
OLD = {(A, ASM): 1.0, (A, GEMM): 3.0, (B, ASM): 2.0, (C, ASM): 4.0}
NEW = {(A, ASM): 0.5, (A, WINO): 0.25, (B, ASM): 2.5, (D, GEMM): 8.0}


def _two(scene: Scene) -> PromotionReport:
    """Version 1 has layers A, B, C; version 2 has A faster, B slower, D new, C missing."""
    scene.build(2, scene.session(NEW))
    scene.build(1, scene.session(OLD))
    return scene.report(2, 1)


def _grown(scene: Scene, before: dict[str, float], after: dict[str, float]) -> PromotionReport:
    """Version 2 with other times for the layers of version 1."""
    scene.build(1, scene.session({(driver, ASM): time_ms for driver, time_ms in before.items()}))
    scene.build(
        2, scene.session({(driver, ASM): time_ms for driver, time_ms in after.items()}), base=1
    )
    return scene.report(2)


def _numbers(tally: ModelTally) -> tuple[int, ...]:
    return (tally.faster, tally.slower, tally.equal, tally.new, tally.missing)


def test_each_model_has_its_faster_slower_new_and_missing_layers_and_its_weighted_time(
    scene: Scene,
) -> None:
    scene.network("Resnet50", {A: 3, B: 1, C: 2})
    scene.network("Bert", {A: 1, D: 5})
    found = _two(scene)
    assert (found.library, found.version, found.against, found.session_id, found.left_out) == (
        "miopen",
        2,
        1,
        None,
        0,
    )
    bert, resnet = found.models
    assert (bert.name, _numbers(bert)) == ("Bert 1", (1, 0, 0, 1, 0))
    assert (resnet.name, _numbers(resnet)) == ("Resnet50 1", (1, 1, 0, 0, 1))
    # the fastest solver of A, before and after
    assert (bert.before_ms, bert.after_ms) == (1.0, 0.25)
    assert (resnet.before_ms, resnet.after_ms) == (3 * 1.0 + 2.0, 3 * 0.25 + 2.5)
    assert _numbers(found.total) == (1, 1, 0, 1, 1)  # a layer of two models counts once,
    # with both weights
    assert (found.total.before_ms, found.total.after_ms) == (4 * 1.0 + 2.0, 4 * 0.25 + 2.5)
    assert found.total.ratio == pytest.approx(3.5 / 6)


def test_layers_of_no_model_come_last_with_weight_one(scene: Scene) -> None:
    scene.network("zebra", {A: 2})
    found = _two(scene)
    assert [tally.name for tally in found.models] == ["zebra 1", "(no model)"]
    assert _numbers(found.models[1]) == (0, 1, 0, 1, 1)
    assert found.total.before_ms == 2 * 1.0 + 2.0


def test_a_network_of_several_frameworks_counts_once_with_the_largest_weight(scene: Scene) -> None:
    scene.network("Resnet50", {A: 3})
    (model,) = scene.rows(sa.select(models.Model.id))
    with scene.builder() as build:
        keys = {
            "model_id": model.id,
            "framework_id": build.insert(models.Framework, name="other", version="1"),
        }
        build.insert(models.ModelConfig, **keys, config_id=build.config(A), gpu_count=8, weight=4)
    assert _grown(scene, {A: 1.0}, {A: 2.0}).models[0].after_ms == 4 * 2.0


def test_changes_say_what_was_there_and_what_is_with_their_origins(scene: Scene) -> None:
    found = _two(scene)
    (slower,), (faster,) = found.regressions, found.gains
    assert (slower.before.time_ms, slower.after.time_ms, slower.ratio) == (2.0, 2.5, 1.25)
    assert (slower.before.version, slower.after.version) == (1, 2)
    assert (slower.before.session_id, slower.after.session_id) == (2, 1)
    assert (faster.before.solver, faster.after.solver) == (ASM, WINO)
    assert found.solver_changes == ((ASM, WINO, 1),)
    assert [entry.time_ms for entry in found.missing_layers] == [4.0]
    text = "\n".join(found.lines())
    assert text.startswith("golden version 2 of miopen against version 1\n")
    assert "left out" not in text
    assert "+25.00 %" in text
    assert f"before #{slower.before.id} {ASM} []; session 2" in text
    assert "-75.00 %" in text
    assert f"{ASM} -> {WINO}" in text
    assert "missing layers (1 of 1):" in text
    assert "session 2 (effort 2), library 3.3.0-abc" in text


def test_equal_times_are_neither_faster_nor_slower_though_the_solver_changed(scene: Scene) -> None:
    scene.build(1, scene.session({(A, GEMM): 1.0}))
    scene.build(2, scene.session({(A, ASM): 1.0}), base=1)  # ties are broken by name
    found = scene.report(2)
    assert _numbers(found.total) == (0, 0, 1, 0, 0)
    assert found.solver_changes == ((GEMM, ASM, 1),)
    assert (found.regressions, found.gains) == ((), ())


def test_a_layer_on_another_device_is_another_layer(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    scene.build(2, scene.session({(A, ASM): 2.0}, arch="gfx908", num_cu=120), base=1)
    assert _numbers(scene.report(2).total) == (0, 0, 1, 1, 0)


def test_the_worst_come_first_and_all_of_them_count(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_MAX_ITEMS", 1)
    monkeypatch.setattr("tuna.db.bulk.IN_LIST", 1)
    found = _grown(scene, {A: 1.0, B: 1.0, C: 1.0, D: 1.0}, {A: 1.1, B: 1.5, C: 0.9, D: 0.5})
    assert found.slower_ratios == (1.5, 1.1)
    assert ([c.ratio for c in found.regressions], [c.ratio for c in found.gains]) == ([1.5], [0.5])
    assert (
        "2 layers are more than 5 % slower, the worst by 50 %" in check_gate(found, 0.05, None)[0]
    )


def test_without_a_base_everything_is_new(scene: Scene) -> None:
    scene.build(1, scene.session(OLD))
    found = scene.report(1)
    assert (found.against, _numbers(found.total), found.total.ratio) == (
        None,
        (0, 0, 0, 3, 0),
        None,
    )
    assert "against nothing: it has no base" in found.lines()[0]
    assert check_gate(found, 0.0, None) == []
    assert "no gain can be measured" in check_gate(found, None, 0.0)[0]


def test_what_is_not_there_is_not_compared(scene: Scene) -> None:
    with pytest.raises(NotFound, match="Unknown golden version 1") as refusal:
        scene.report(1)
    assert refusal.value.hint == "golden versions: none yet"
    scene.build(1, scene.session({(A, ASM): 1.0}))
    with pytest.raises(NotFound, match="Unknown golden version 7 of miopen"):
        scene.report(1, 7)
    with pytest.raises(NotFound, match="Unknown golden version 1 of tvm"):
        scene.report(1, library="tvm")


def test_a_layer_may_be_slower_by_just_the_limit(scene: Scene) -> None:
    found = _grown(scene, {A: 2.0, B: 1.0}, {A: 2.1, B: 0.1})
    assert check_gate(found, 0.05, None) == []  # tolerant of binary fractions
    assert len(check_gate(found, 0.0499, None)) == 1


def test_a_missing_layer_violates_the_limit_of_regressions(scene: Scene) -> None:
    found = _two(scene)
    slower, missing = check_gate(found, 0.1, None)
    assert slower.startswith("1 layer is more than 10 % slower, the worst by 25 %: ")
    assert slower.endswith(" on gfx90a x 104")
    assert missing.startswith("1 layer is missing that version 1 has, such as ")
    assert len(check_gate(found, 0.25, None)) == 1
    assert check_gate(found, None, None) == []


def test_the_total_time_must_shrink_by_the_gain_asked_for(scene: Scene) -> None:
    found = _grown(scene, {A: 1.0}, {A: 0.9})
    assert check_gate(found, None, 0.1) == []
    assert "shrinks by 10 % instead of shrinking by 20 %" in check_gate(found, None, 0.2)[0]
    assert check_gate(scene.report(1, 1), None, 0.0) == []
    (entry,) = [entry for entry in scene.entries(2) if entry.time_ms == 0.9]
    scene.execute(
        sa.update(models.GoldenEntry).where(models.GoldenEntry.id == entry.id).values(time_ms=1.1)
    )
    assert "grows by 10 % instead" in check_gate(scene.report(2), None, 0.0)[0]


def test_a_gain_counts_by_weight(scene: Scene) -> None:
    scene.network("Resnet50", {A: 9, B: 1})
    found = _grown(scene, {A: 1.0, B: 1.0}, {A: 0.9, B: 1.5})
    assert check_gate(found, None, 0.04) == []  # 10 ms become 9.6 ms
    assert check_gate(found, None, 0.05) != []


def test_a_session_is_compared_as_the_version_that_would_be_built_of_it(scene: Scene) -> None:
    scene.network("Resnet50", {A: 3, B: 1, C: 2})
    scene.build(1, scene.session(OLD))
    before = scene.everything()
    session = scene.session(NEW)
    found = scene.report_session(session, 1)
    assert scene.everything() == before
    assert (found.library, found.version, found.session_id, found.against) == (
        "miopen",
        None,
        session,
        1,
    )
    assert found.lines()[0] == f"session {session} of miopen against version 1"
    with scene.builder() as other:  # a version of the session alone, beside version 1
        other.insert(models.Golden, library="miopen", version=2, state="draft")
    build(scene.engine, version=2, session_id=session, base_version=None, overwrite=True)
    version = scene.report(2, 1)
    assert (found.total, found.models, found.solver_changes) == (
        version.total,
        version.models,
        version.solver_changes,
    )
    assert found.slower_ratios == version.slower_ratios
    assert check_gate(found, 0.1, 0.5) == check_gate(version, 0.1, 0.5)
    ours, theirs = found.regressions[0].after, version.regressions[0].after
    assert (ours.version, theirs.version) == (None, 2)
    assert ours.origin == theirs.origin
    # no number: only golden entries have one
    assert f"after  {ours.solver} [" in "\n".join(found.lines())
    assert {**vars(ours), "id": 0, "version": 0} == {**vars(theirs), "id": 0, "version": 0}


def test_a_session_is_compared_on_its_own_device_only(scene: Scene) -> None:
    scene.build(1, scene.session(OLD))
    session = scene.session({(A, ASM): 1.0}, arch="gfx908", num_cu=120)
    assert _numbers(scene.report_session(session, 1).total) == (0, 0, 0, 1, 0)
    scene.build(2, session, base=1)
    assert _numbers(scene.report_session(session, 2).total) == (0, 0, 1, 0, 0)
    assert _numbers(scene.report_session(scene.session({(A, ASM): 1.0}, num_cu=110), 2).total) == (
        0,
        0,
        0,
        1,
        0,
    )


def test_what_could_not_become_golden_is_left_out_of_a_session_and_counted(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0, (B, ASM): 2.0, (C, ASM): 3.0}))
    session = scene.session(
        {
            (A, ASM): {"time_ms": 0.1, "state": "errored"},
            # imported, which a report may compare
            (B, ASM): {"time_ms": 1.0, "source": "gfx90a68.db sha256:1f"},
            (C, ASM): 0.0,
        }
    )
    found = scene.report_session(session, 1)
    assert (_numbers(found.total), found.left_out, found.as_json()["left_out"]) == (
        (1, 0, 0, 0, 2),
        2,
        2,
    )
    assert found.lines()[1] == "left out: 2 results of the session that cannot become golden"


def test_a_session_needs_a_version_of_its_own_library(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    tvm = scene.session({(A, "TvmConvIm2col"): 2.0}, library="tvm")
    with pytest.raises(NotFound, match="Unknown golden version 1 of tvm"):
        scene.report_session(tvm, 1)
    with pytest.raises(BadInput, match="belongs to tvm, not to miopen"):
        scene.report_session(tvm, 1, library="miopen")
    with pytest.raises(NotFound, match="Unknown session 9"):
        scene.report_session(9, 1)
    scene.build(1, tvm)
    assert scene.report_session(1, 1).library == "miopen"  # the session says whose version 1 it is


def test_a_draft_that_is_overwritten_while_it_is_compared_is_no_crash(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scene.engine.dialect.name == "sqlite":
        return  # a reader has snapshot isolation there
    scene.build(1, scene.session({(A, ASM): 1.0}))
    scene.build(2, scene.session({(A, ASM): 2.0}), base=1)
    newer = scene.session({(A, ASM): 3.0})
    read = compare.read_entries

    def overwrite(*arguments: Any) -> Any:
        scene.build(2, newer, overwrite=True)
        return read(*arguments)

    monkeypatch.setattr(compare, "read_entries", overwrite)
    with pytest.raises(ResultsChanged):
        scene.report(2)

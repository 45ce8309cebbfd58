"""Explaining an entry or a layer: provenance, and the difference to the base."""

from __future__ import annotations

import hashlib

import pytest
import sqlalchemy as sa
from builders import DatabaseBuilder
from golden_scene import ASM, GEMM, A, B, C, Scene

from tuna.configs import parse_line
from tuna.configs.problem import text_of
from tuna.db import models
from tuna.errors import BadInput, NotFound

pytestmark = pytest.mark.both_databases_in_drills

OLD = {
    "time_ms": 1.0,
    "params": "4,4",
    "algorithm": "Direct",
    "workspace_bytes": 64,
    "code": [b"old"],
}
NEW = {
    "time_ms": 0.5,
    "params": "8,8",
    "algorithm": "Direct",
    "workspace_bytes": 64,
    "code": [b"new 0", b"new 1"],
}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def two(scene: Scene) -> Scene:
    """Version 2 on version 1: A's ASM replaced, A's GEMM new, B taken over."""
    scene.build(1, scene.session({(A, ASM): OLD, (B, ASM): OLD}))
    scene.build(2, scene.session({(A, ASM): NEW, (A, GEMM): 2.0}), base=1)
    return scene


def test_an_entry_by_its_number_tells_all_of_its_origin(two: Scene) -> None:
    asm, _, _ = two.entries(2)
    for key in (str(asm.id), f"#{asm.id}"):
        (found,) = two.explain(2, key)
        entry = found.entry
        assert (entry.id, entry.version, entry.solver, entry.time_ms, entry.params) == (
            asm.id,
            2,
            ASM,
            0.5,
            "8,8",
        )
        assert (entry.session_id, entry.reason, entry.library_version) == (
            2,
            "effort 2",
            "3.3.0-abc",
        )
        assert (entry.worker, entry.device, entry.source) == ("eval@host-2", "MI210 #2", None)
        assert entry.toolchain
        assert found.kernels == (_digest(b"new 0"), _digest(b"new 1"))


def test_the_bases_entry_is_beside_the_one_that_replaced_it(two: Scene) -> None:
    (found,) = two.explain(2, A, solver=ASM)
    assert found.base is not None
    old = two.entries(1)[0]
    assert (found.base.id, found.base.version, found.base.session_id, found.base.time_ms) == (
        old.id,
        1,
        1,
        1.0,
    )
    assert found.base_kernels == (_digest(b"old"),)
    assert found.changes == ("time_ms", "params", "session_id", "kernels")
    assert (
        found.verdict
        == f"replaced that of version 1 (#{old.id}): time_ms, params, session_id, kernels"
    )
    text = "\n".join(found.lines())
    for part in (
        "0.5 ms, workspace 64 bytes, Direct",
        "before: 1 ms",
        f"before: {ASM} [4,4]",
        _digest(b"old"),
    ):
        assert part in text
    assert "measured 2026-03-04 09:30:09 UTC by eval@host-2 on MI210 #2" in text


def test_an_entry_that_a_search_found_says_which_rule_ended_it(two: Scene) -> None:
    _, gemm, _ = two.entries(2)
    (asm,) = two.explain(2, A, solver=ASM)
    assert (asm.search_ended, asm.as_json()["search_ended"]) == ("", "")
    assert "ended" not in "\n".join(asm.lines())
    result = sa.select(models.FindDb).where(
        models.FindDb.session_id == 2, models.FindDb.time_ms == 0.5
    )
    with two.engine.begin() as connection:
        row = connection.execute(result).one()
        facts = {
            "steps": "search,compile,eval",
            "step": "eval",
            "state": "evaluated",
            "reason": "",
            "options": {},
        }
        build = DatabaseBuilder(connection)
        ids = (row.session_id, row.config_id, row.solver_id)
        build.job(*ids, **facts, stopped="all trials are done")
        later = build.job(*ids, **facts, round=1)
        connection.execute(
            sa.update(models.FindDb).where(models.FindDb.id == row.id).values(job_id=later)
        )
    (asm,) = two.explain(2, A, solver=ASM)
    assert "  its search ended: all trials are done" in asm.lines()
    assert asm.as_json()["search_ended"] == "all trials are done"
    (gemm_,) = two.explain(2, str(gemm.id))
    assert gemm_.search_ended == ""
    with two.engine.begin() as connection:
        connection.execute(
            sa.update(models.FindDb).where(models.FindDb.id == row.id).values(time_ms=0.4)
        )
    (asm,) = two.explain(2, A, solver=ASM)
    assert asm.search_ended == "", "the session has another result now"


def test_what_is_new_and_what_was_taken_over_says_so(two: Scene) -> None:
    (new,) = two.explain(2, A, solver=GEMM)
    assert (new.base, new.base_kernels, new.changes) == (None, (), ())
    assert new.verdict == "new: version 1 has no such entry"
    (kept,) = two.explain(2, B)
    old = two.entries(1)[1]
    assert kept.verdict == f"taken over from version 1 (#{old.id})"
    assert kept.kernels == kept.base_kernels == (_digest(b"old"),)
    assert "before:" not in "\n".join(kept.lines())
    (first,) = two.explain(1, A)
    assert (first.base_version, first.verdict) == (None, "the version has no base")


def test_a_layer_goes_by_config_key_problem_key_label_and_driver_command(two: Scene) -> None:
    (config,) = parse_line(A)
    spelt_otherwise = A.replace("./bin/MIOpenDriver conv -n 1 -c 3", "MIOpenDriver conv -c 3 -n 1")
    for key in (config.key, text_of(config), config.label, config.driver(), A, spelt_otherwise):
        assert key
        assert [one.entry.solver for one in two.explain(2, key)] == [ASM, GEMM], key


def test_the_key_of_a_layer_counts_before_one_that_a_worker_told_an_older_version(
    scene: Scene,
) -> None:
    """It is the key of a layer that has none: a transposed convolution."""
    transposed = A.replace("-F 1", "-m trans -F 1")
    scene.build(1, scene.session({(transposed, ASM): 1.0, (A, GEMM): 1.0, (B, ASM): 1.0}))
    told = models.GoldenEntry.config_id.in_([scene.config_id(transposed), scene.config_id(A)])
    scene.execute(sa.update(models.GoldenEntry).where(told).values(problem_key="64-1-F"))
    (found,) = scene.explain(1, "64-1-F")
    assert found.entry.problem_key == "64-1-F"
    assert found.entry.config_key == parse_line(transposed)[0].key
    (other,) = scene.explain(1, A)
    assert other.entry.problem_key == text_of(parse_line(A)[0])


def test_entries_come_by_device_and_then_fastest_first(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 2.0, (A, GEMM): 1.0}))
    scene.build(2, scene.session({(A, ASM): 3.0}, arch="gfx908", num_cu=120), base=1)
    found = [(one.entry.arch, one.entry.time_ms) for one in scene.explain(2, A)]
    assert found == [("gfx908", 3.0), ("gfx90a", 1.0), ("gfx90a", 2.0)]


def test_an_imported_entry_names_its_file(scene: Scene) -> None:
    source = "gfx90a68.HIP.fdb.txt sha256:1f"
    scene.build(
        1, scene.session({(A, ASM): {"time_ms": 1.0, "source": source}}), allow_imported=True
    )
    (found,) = scene.explain(1, A)
    assert found.entry.origin.endswith(f"imported from {source}")
    assert found.as_json()["entry"]["measured_at"] is None


def test_an_entry_is_explained_when_its_session_has_lost_its_results(two: Scene) -> None:
    def told() -> list[object]:
        found = [one.as_json() for one in two.explain(2, A)]
        # what the session measured, the entry does not have
        return [{**one, "measurement": None, "same_candidate": False} for one in found]

    before = told()
    for table in (
        models.FindDbKernel,
        models.FindDb,
        models.TrialRow,
        models.StepResultRow,
        models.Job,
    ):
        two.execute(sa.delete(table))
    assert told() == before


def test_a_key_that_names_nothing_is_not_found(two: Scene) -> None:
    for key in (C, "64-nosuch-F", "nonsense", "1,2", "#", "", "9" * 30):
        with pytest.raises(NotFound, match="version 2 of miopen has no entry") as refusal:
            two.explain(2, key)
        assert "config key, problem key, label or driver command" in refusal.value.hint


def test_an_entry_of_another_version_or_solver_is_not_found(two: Scene) -> None:
    other = two.entries(1)[0]
    with pytest.raises(NotFound, match=f"version 2 of miopen has no entry {other.id}"):
        two.explain(2, str(other.id))
    with pytest.raises(NotFound, match=f"no entry .* with {GEMM}"):
        two.explain(2, B, solver=GEMM)
    with pytest.raises(NotFound, match="Unknown golden version 3"):
        two.explain(3, A)


def test_where_libraries_share_a_number_the_library_must_be_named(two: Scene) -> None:
    two.build(2, two.session({(A, "TvmConvIm2col"): 7.0}, library="tvm"))
    with pytest.raises(BadInput, match="Several libraries"):
        two.explain(2, A)
    assert [one.entry.time_ms for one in two.explain(2, A, library="tvm")] == [7.0]

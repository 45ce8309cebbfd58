"""Building golden versions: which entries come from the base, the session and the draft."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import sqlalchemy as sa
from builders import START
from golden_scene import ASM, GEMM, A, B, C, Scene

from tuna.db import models
from tuna.errors import BadInput, NotFound
from tuna.golden import (
    GoldenExists,
    NotReleasable,
    SessionChanged,
)
from tuna.vocabulary import BASELINE

pytestmark = pytest.mark.both_databases_in_drills


def test_a_first_version_holds_the_session_with_where_it_comes_from(scene: Scene) -> None:
    session = scene.session(
        {
            (A, ASM): {
                "time_ms": 0.25,
                "params": "0,2,7",
                "workspace_bytes": 2**40,
                "algorithm": "miopenConvolutionFwdAlgoDirect",
                "code": [b"\x7fELF one", b"\x7fELF two"],
                "workload": b"problem",
            },
            (A, GEMM): 0.5,
        }
    )
    report = scene.build(1, session)
    assert (report.library, report.new, report.entries, report.from_session) == (
        "miopen",
        True,
        2,
        2,
    )
    assert (report.from_base, report.replaced, report.imported, report.kernels) == (0, 0, 0, 2)
    asm, gemm = scene.entries(1)
    assert (asm.arch, asm.num_cu, asm.config_id, asm.solver) == (
        "gfx90a",
        104,
        scene.config_id(A),
        ASM,
    )
    assert (asm.time_ms, asm.params, asm.workspace_bytes) == (0.25, "0,2,7", 2**40)
    assert asm.algorithm == "miopenConvolutionFwdAlgoDirect"
    assert (asm.session_id, asm.worker, asm.device) == (
        session,
        f"eval@host-{session}",
        f"MI210 #{session}",
    )
    # a trial, 5 s of compiling, 3 s of measuring
    assert asm.measured_at == START + timedelta(days=1, seconds=9)
    assert asm.source is None
    assert scene.kernels(asm.id) == [
        (b"\x7fELF one", "k0.o", "-O3"),
        (b"\x7fELF two", "k1.o", "-O3"),
    ]
    assert scene.rows(
        sa.select(models.KernelRow.blob).where(models.KernelRow.digest == asm.workload)
    ) == [(b"problem",)]
    assert (gemm.time_ms, gemm.workload, scene.kernels(gemm.id)) == (0.5, None, [])
    (golden,) = scene.rows(sa.select(models.Golden.__table__))
    assert (golden.version, golden.state, golden.base_version, golden.promoted_at) == (
        1,
        "draft",
        None,
        None,
    )


def test_a_baseline_is_released_only_where_it_is_the_only_one(scene: Scene) -> None:
    session = scene.session({(A, ASM): 3.0, (A, "Untuned"): 1.0, (B, "Untuned"): 2.0})
    with scene.builder() as build:
        build.connection.execute(
            sa.update(models.SolverRow)
            .where(models.SolverRow.name == "Untuned")
            .values(algorithm=BASELINE)
        )
    assert scene.build(1, session).entries == 2
    assert {(entry.config_id, entry.solver) for entry in scene.entries(1)} == {
        (scene.config_id(A), ASM),
        (scene.config_id(B), "Untuned"),
    }


def test_base_and_session_take_the_sessions_numbers_faster_or_slower(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0, (A, GEMM): 2.0, (B, ASM): 3.0, (C, ASM): 4.0}))
    newer = scene.session({(A, ASM): 0.5, (B, ASM): 30.0, (B, GEMM): 5.0})
    before = scene.everything()[1]
    report = scene.build(2, newer, base=1)
    a, b, c = map(scene.config_id, (A, B, C))
    assert scene.times(2) == {
        ("gfx90a", a, ASM): 0.5,
        ("gfx90a", a, GEMM): 2.0,  # another solver for the same layer stays
        ("gfx90a", b, ASM): 30.0,  # slower, but newer
        ("gfx90a", b, GEMM): 5.0,
        ("gfx90a", c, ASM): 4.0,
    }
    assert (report.entries, report.from_base, report.from_session, report.replaced) == (5, 2, 3, 2)
    assert "3 from session 2, 2 from version 1, 2 replaced" in str(report)
    assert {row.session_id for row in scene.entries(2) if row.time_ms in (0.5, 30.0, 5.0)} == {
        newer
    }
    assert scene.everything()[1][: len(before)] == before  # the base is as it was


def test_a_result_replaces_the_bases_though_its_algorithm_changed_and_brings_its_kernels(
    scene: Scene,
) -> None:
    old = {
        "time_ms": 1.0,
        "algorithm": "Direct",
        "code": [b"old 0", b"old 1"],
    }
    new = {"time_ms": 1.0, "algorithm": "Winograd", "code": [b"new"]}
    scene.build(1, scene.session({(A, ASM): old, (B, ASM): old}))
    session = scene.session({(A, ASM): new})
    for report in (scene.build(2, session, base=1), scene.build(1, session, overwrite=True)):
        replaced, kept = scene.entries(report.version)
        assert replaced.algorithm == "Winograd"
        assert [code for code, _, _ in scene.kernels(replaced.id)] == [b"new"]
        assert kept.algorithm == "Direct"
        assert [code for code, _, _ in scene.kernels(kept.id)] == [b"old 0", b"old 1"]
        assert (report.kernels, report.replaced) == (3, 1)


def test_another_device_replaces_nothing(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    scene.build(2, scene.session({(A, ASM): 2.0}, arch="gfx908", num_cu=120), base=1)
    scene.build(3, scene.session({(A, ASM): 3.0}, num_cu=110), base=2)
    assert [(row.arch, row.num_cu, row.time_ms) for row in scene.entries(2)] == [
        ("gfx908", 120, 2.0),
        ("gfx90a", 104, 1.0),
    ]
    assert sorted(row.time_ms for row in scene.entries(3)) == [1.0, 2.0, 3.0]


def test_a_version_from_a_base_alone_holds_the_same_rows(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): {"time_ms": 1.0, "code": [b"a"]}, (B, ASM): 2.0}))
    report = scene.build(2, base=1)
    assert (report.from_base, report.kernels, report.session_id) == (2, 1, None)
    assert [row[2:] for row in scene.entries(2)] == [row[2:] for row in scene.entries(1)]


def test_a_version_that_exists_is_refused_unless_overwritten(scene: Scene) -> None:
    first = scene.session({(A, ASM): 1.0, (B, ASM): 2.0})
    scene.build(1, first)
    before = scene.everything()
    second = scene.session({(A, ASM): 9.0, (C, ASM): 3.0})
    with pytest.raises(GoldenExists, match="version 1 of miopen exists already") as refusal:
        scene.build(1, second)
    assert "--overwrite" in refusal.value.hint
    assert scene.everything() == before
    report = scene.build(1, second, overwrite=True)
    assert (report.new, report.entries, report.from_session, report.replaced) == (False, 3, 2, 1)
    assert sorted(scene.times(1).values()) == [2.0, 3.0, 9.0]


def test_overwriting_a_draft_with_a_base_keeps_what_neither_replaces(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0, (B, ASM): 2.0}))
    scene.build(2, scene.session({(A, ASM): 10.0, (C, ASM): 30.0}), base=1)
    report = scene.build(2, scene.session({(B, ASM): 200.0}), base=1, overwrite=True)
    a, b, c = map(scene.config_id, (A, B, C))
    assert scene.times(2) == {
        ("gfx90a", a, ASM): 1.0,
        ("gfx90a", b, ASM): 200.0,
        ("gfx90a", c, ASM): 30.0,
    }
    assert (report.from_base, report.from_session, report.entries) == (1, 1, 3)


def test_overwrite_of_a_missing_version_builds_it(scene: Scene) -> None:
    assert scene.build(1, scene.session({(A, ASM): 1.0}), overwrite=True).new


def test_a_new_version_needs_a_base_once_there_are_older_ones(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0})
    scene.build(3, session)
    before = scene.everything()
    with pytest.raises(BadInput, match="needs a base") as refusal:
        scene.build(4, session)
    assert refusal.value.hint.endswith("--base 3")
    with pytest.raises(BadInput, match="needs a session, a base version, or both"):
        scene.build(4)
    assert scene.everything() == before


def test_zero_is_a_version_like_any_other(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0})
    with pytest.raises(NotFound, match="Unknown golden version 0 of miopen"):
        scene.build(1, session, base=0)
    scene.build(0, session)
    with pytest.raises(BadInput, match="needs a base"):
        scene.build(1, session)
    assert scene.build(1, base=0).entries == 1
    for number in (-1, 2**31):
        with pytest.raises(BadInput, match="a number from 0"):
            scene.build(number, session)


def test_a_base_must_be_there_be_another_and_be_older(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0})
    scene.build(5, session)
    before = scene.everything()
    with pytest.raises(NotFound, match="Unknown golden version 4 of miopen") as refusal:
        scene.build(6, session, base=4)
    assert refusal.value.hint == "golden versions: 5"
    with pytest.raises(NotFound, match="Unknown golden version 4"):
        scene.build(6, base=4)
    with pytest.raises(BadInput, match="built on itself"):
        scene.build(5, session, base=5, overwrite=True)
    with pytest.raises(BadInput, match="built on the newer version 5"):
        scene.build(4, session, base=5)
    assert scene.everything() == before
    scene.build(6, base=5)
    with pytest.raises(BadInput, match="built on the newer version 6"):
        scene.build(5, session, base=6, overwrite=True)
    assert scene.rows(sa.select(models.Golden.version).order_by(models.Golden.version)) == [
        (5,),
        (6,),
    ]


@pytest.mark.parametrize("length", [128, 135, 5000, 70_000])
def test_params_are_never_cut(scene: Scene, length: int) -> None:
    params = "DeviceGroupedConvFwd<256,128,×>"[:30] * 2400
    scene.build(1, scene.session({(A, ASM): {"time_ms": 1.0, "params": params[:length]}}))
    scene.build(2, base=1)
    assert [len(scene.entries(version)[0].params) for version in (1, 2)] == [length, length]
    assert scene.entries(2)[0].params == params[:length]


@pytest.mark.parametrize("time_ms", [-1.0, 5e-324, 1e-7, 1e8, 1e308, math.inf])
def test_what_no_run_can_have_taken_is_left_out_with_a_sentence(
    scene: Scene, time_ms: float
) -> None:
    """Older versions took in such times; nothing could be released of their sessions."""
    if time_ms == math.inf and scene.engine.dialect.name != "sqlite":
        return  # MySQL has no infinity
    session = scene.session({(A, ASM): time_ms, (A, GEMM): 1.0})
    report = scene.build(1, session)
    assert (report.entries, report.left_out) == (1, 1)
    assert "1 result left out, for no run can have taken less than 1 ns or more than a day" in str(
        report
    )
    assert [row.solver for row in scene.entries(1)] == [GEMM]
    with pytest.raises(BadInput, match="has no results"):
        scene.build(2, scene.session({(A, ASM): time_ms}), base=1)


@pytest.mark.parametrize("time_ms", [0.0, None])
def test_what_is_no_time_is_refused(scene: Scene, time_ms: float | None) -> None:
    session = scene.session({(A, ASM): time_ms, (A, GEMM): 1.0})
    with pytest.raises(
        NotReleasable, match=rf"Some of the 2 results .* 1 have no time.*such as {ASM} for "
    ):
        scene.build(1, session)
    assert scene.everything() == [[], [], []]


@pytest.mark.parametrize(
    ("spoilt", "said", "todo"),
    [
        ({"state": "errored"}, "not evaluated", "tuna run"),
        ({"state": "eval_queued"}, "not evaluated", "tuna run"),
        ({"cause": "wrong_result"}, "a candidate that failed", "again"),
        ({"ok": False}, "no record of the attempt", "again"),
        ({"source": "gfx90a68.db sha256:1f"}, "were imported", "--allow-imported"),
    ],
)
def test_what_nobody_verified_is_refused(
    scene: Scene, spoilt: dict[str, str], said: str, todo: str
) -> None:
    session = scene.session({(A, ASM): {"time_ms": 1.0, **spoilt}, (B, ASM): 2.0})
    with pytest.raises(NotReleasable, match=f"1 .*{said}") as refusal:
        scene.build(1, session)
    assert todo in refusal.value.hint
    assert scene.everything() == [[], [], []]


@pytest.mark.parametrize("unknown", ["library_version", "toolchain"])
def test_results_of_an_unknown_environment_are_refused(scene: Scene, unknown: str) -> None:
    session = scene.session({(A, ASM): 1.0, (B, ASM): 2.0}, **{unknown: ""})
    with pytest.raises(
        NotReleasable, match="2 come from an environment without library version or toolchain"
    ):
        scene.build(1, session, allow_imported=True)


def test_results_from_nowhere_are_refused_and_imported_ones_only_on_demand(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0, (B, ASM): 2.0})
    row = models.FindDb.config_id == scene.config_id(A)
    scene.execute(sa.update(models.FindDb).where(row).values(job_id=None))
    with pytest.raises(NotReleasable, match="1 have neither a job nor a file"):
        scene.build(1, session, allow_imported=True)
    scene.execute(
        sa.update(models.FindDb).where(row).values(source="gfx90a68.HIP.fdb.txt sha256:1f")
    )
    with pytest.raises(NotReleasable, match="1 were imported"):
        scene.build(1, session)
    report = scene.build(1, session, allow_imported=True)
    assert report.imported == 1
    imported, measured = scene.entries(1)
    assert (imported.source, imported.worker, imported.device) == (
        "gfx90a68.HIP.fdb.txt sha256:1f",
        "",
        "",
    )
    assert imported.measured_at is None
    assert (measured.source, measured.worker) == (None, f"eval@host-{session}")
    # as an imported perf db
    scene.execute(sa.update(models.FindDb).where(row).values(time_ms=None))
    with pytest.raises(NotReleasable, match="1 have no time"):
        scene.build(2, session, base=1, allow_imported=True)


def test_noisy_results_are_released_only_on_demand_and_stay_marked(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0, (B, ASM): 2.0})
    row = models.FindDb.config_id == scene.config_id(A)
    scene.execute(sa.update(models.FindDb).where(row).values(noisy=True, clock="cpu"))
    with pytest.raises(
        NotReleasable, match="1 were measured on a device that was not quiet"
    ) as refusal:
        scene.build(1, session)
    assert "--allow-noisy" in refusal.value.hint
    assert scene.everything() == [[], [], []]
    scene.build(1, session, allow_noisy=True)
    scene.build(2, None, base=1)
    for version in (1, 2):
        assert [(entry.noisy, entry.clock) for entry in scene.entries(version)] == [
            (True, "cpu"),
            (False, ""),
        ]


def test_the_latest_good_attempt_at_the_device_step_counts(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0})
    (job,) = scene.rows(sa.select(models.Job.id))[0]
    with scene.builder() as build:
        for attempt, ok in ((2, True), (3, False)):
            build.step(
                job,
                "eval",
                1.0,
                1.0,
                f"card {attempt}",
                worker=f"w{attempt}",
                attempt=attempt,
                ok=ok,
            )
        build.step(job, "compile", 1.0, 1.0, attempt=4, worker="compile@host-9")
    scene.build(1, session)
    (entry,) = scene.entries(1)
    assert (entry.worker, entry.device) == ("w2", "card 2")


def test_batch_norm_and_a_kind_of_its_own(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0, (B, ASM): 2.0})
    scene.execute(
        sa.update(models.ConfigRow)
        .where(models.ConfigRow.id == scene.config_id(B))
        .values(kind="batch_norm", problem_key=None)
    )
    assert scene.build(1, session, kind="batch_norm").entries == 1
    assert scene.entries(1)[0].config_id == scene.config_id(B)
    assert scene.build(1, session, overwrite=True, kind="convolution").entries == 2
    with pytest.raises(BadInput, match="no results for gemm"):
        scene.build(1, session, overwrite=True, kind="gemm")


def test_libraries_do_not_mix_and_number_their_versions_themselves(scene: Scene) -> None:
    miopen, tvm = (
        scene.session({(A, ASM): 1.0}),
        scene.session({(A, "TvmConvIm2col"): 2.0}, library="tvm"),
    )
    scene.build(1, miopen)
    with pytest.raises(BadInput, match="one of miopen: libraries do not mix, and this one is tvm"):
        scene.build(2, tvm, base=1)
    with pytest.raises(BadInput, match="belongs to tvm, not to miopen"):
        scene.build(2, tvm, library="miopen")
    assert scene.build(1, tvm).library == "tvm"
    assert (list(scene.times(1).values()), list(scene.times(1, "tvm").values())) == ([1.0], [2.0])
    with pytest.raises(BadInput, match="Several libraries have a golden version 1: miopen, tvm"):
        scene.build(2, base=1)
    assert scene.build(2, base=1, library="tvm").library == "tvm"


def test_a_session_that_is_not_there_or_empty_is_refused(scene: Scene) -> None:
    with pytest.raises(NotFound, match="Unknown session 7"):
        scene.build(1, 7)
    with pytest.raises(BadInput, match="Session 1 has no results"):
        scene.build(1, scene.session({}))
    assert scene.everything() == [[], [], []]


def test_two_results_for_one_layer_and_solver_are_refused(scene: Scene) -> None:
    if scene.engine.dialect.name == "sqlite":
        return  # its unique key cannot be dropped
    session = scene.session({(A, ASM): 1.0})
    row = dict(scene.rows(sa.select(models.FindDb.__table__))[0]._mapping)
    scene.execute(sa.text("ALTER TABLE find_db ADD INDEX other (session_id)"))
    scene.execute(
        sa.text("ALTER TABLE find_db DROP INDEX uq_find_db_session_id_config_id_solver_id")
    )
    scene.execute(sa.insert(models.FindDb).values(**(row | {"id": row["id"] + 1, "time_ms": 2.0})))
    with pytest.raises(SessionChanged) as refused:
        scene.build(1, session)
    assert "lacks its unique keys" in refused.value.hint
    assert scene.everything() == [[], [], []]

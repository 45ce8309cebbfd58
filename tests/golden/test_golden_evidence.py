"""The evidence for an entry, and the lines of exported files that name one, on both databases."""

from __future__ import annotations

import bz2
import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from golden_scene import ASM, GEMM, A, B, Scene

from tuna.api.documents import json_text
from tuna.configs import parse_line
from tuna.configs.problem import text_of
from tuna.db import models
from tuna.db.engine import reading
from tuna.errors import BadInput, NotFound
from tuna.exports.registry import line_names
from tuna.exports.write import export_golden
from tuna.golden import explain_line, promote
from tuna.queue.work_items import seed

pytestmark = pytest.mark.both_databases_in_drills

WINO, NAIVE = "ConvBinWinogradRxSf2x3", "ConvDirectNaiveConvFwd"


@pytest.fixture
def three(scene: Scene) -> Scene:
    """Three versions of A: GEMM won, then ASM by a hair over WINO; B is in the first one alone."""
    scene.build(1, scene.session({(A, GEMM): 1.0, (A, ASM): 2.0, (B, ASM): 1.0}))
    promote(scene.engine, 1, by="ada@lab", note="the | first <b>")
    scene.build(2, scene.session({(A, ASM): 0.5}), base=1)
    scene.build(3, scene.session({(A, ASM): 0.5, (A, WINO): 0.55, (A, NAIVE): 2.0}), base=2)
    return scene


def measured(scene: Scene, solver: str, low: float, high: float) -> None:
    """Give the third session's trial of A by the solver this interval."""
    job = (
        sa.select(models.Job.id)
        .join(models.SolverRow)
        .where(models.Job.session_id == 3, models.SolverRow.name == solver)
    )
    of_job = models.TrialRow.job_id.in_(job.scalar_subquery())
    scene.execute(sa.update(models.TrialRow).where(of_job).values(low_ms=low, high_ms=high))


def test_the_other_solvers_of_the_layer_are_beside_it_with_their_margin(three: Scene) -> None:
    for solver, low, high in ((ASM, 0.49, 0.52), (WINO, 0.51, 0.56), (NAIVE, 1.9, 2.1)):
        measured(three, solver, low, high)
    (asm,) = three.explain(3, A, solver=ASM)
    others = asm.evidence.others
    assert [(one.solver, round(one.margin, 6), one.apart) for one in others] == [
        (WINO, 0.1, False),
        (GEMM, 1.0, None),  # of another session, without an interval
        (NAIVE, 3.0, True),
    ]
    assert (others[0].low_ms, others[0].high_ms) == (0.51, 0.56)
    text = asm.lines()
    assert "  place       1 of 4 solvers" in text
    number = others[0].entry_id
    assert f"  runner-up   #{number} {WINO} 0.55 ms (+10.00%, intervals overlap)" in text
    (wino,) = three.explain(3, A, solver=WINO)
    (fastest,) = (line for line in wino.lines() if "fastest     " in line)
    assert "  place       2 of 4 solvers" in wino.lines()
    assert f"{ASM} 0.5 ms (-9.09%, intervals overlap)" in fastest


def test_the_repeats_are_summed_up_with_spread_and_drift(three: Scene) -> None:
    of_eval = (models.StepResultRow.step == "eval", models.StepResultRow.worker == "eval@host-3")
    three.execute(sa.update(models.StepResultRow).where(*of_eval).values(drift=-0.021))
    measured(three, ASM, 0.49, 0.52)
    found = three.explain(3, A, solver=ASM)[0].evidence.measurement
    assert found is not None
    assert found.spread is not None
    assert (found.low_ms, found.high_ms, found.drift) == (0.49, 0.52, -0.021)
    assert (found.spread.repeats, found.spread.min_ms) == (3, pytest.approx(0.495))
    line = found.line()
    assert line.startswith("95 % interval 0.49 to 0.52 ms; 3 repeats, least 0.495 ms; quartiles ")
    assert line.endswith(" ms apart; drift -2.1%")


def test_the_entry_is_followed_through_all_versions_with_who_promoted_them(three: Scene) -> None:
    (asm,) = three.explain(2, A, solver=ASM)
    seen = [
        (one.version, one.state, one.promoted_by, one.time_ms, one.fastest, one.fastest_ms)
        for one in asm.evidence.history
    ]
    assert seen == [
        (1, "promoted", "ada@lab", 2.0, GEMM, 1.0),
        (2, "draft", "", 0.5, ASM, 0.5),
        (3, "draft", "", 0.5, ASM, 0.5),
    ]
    assert asm.evidence.history[0].entry_id == three.entries(1)[0].id
    text = "\n".join(asm.lines())
    assert " by ada@lab): 2 ms (#" in text
    assert "; note: the | first <b>" in text
    (naive,) = three.explain(3, A, solver=NAIVE)
    assert [one.time_ms for one in naive.evidence.history] == [None, None, 2.0]
    document = json.loads(json_text(asm))
    assert document["history"][0]["note"] == "the | first <b>"
    assert document["history"][0]["promoted_at"].endswith("+00:00")


def test_a_command_repeats_what_was_measured_and_measures_what_was_not(scene: Scene) -> None:
    step = "miopen_find_eval"
    session = scene.session({(A, ASM): 1.0, (A, GEMM): {"time_ms": 2.0, "source": "x.db"}})
    scene.execute(sa.update(models.Job).values(steps=step, step=step))
    of_eval = models.StepResultRow.step == "eval"
    scene.execute(sa.update(models.StepResultRow).where(of_eval).values(step=step))
    scene.build(1, session, allow_imported=True)
    asm, gemm = (one.evidence for one in scene.explain(1, A))
    (config,) = parse_line(A)
    for found, solver in ((asm, ASM), (gemm, GEMM)):
        assert f"--step {step} --solver {solver} --seed {seed(config.key, solver)}" in (
            found.reproduce
        )
        assert found.reproduce.startswith("tuna reproduce --library miopen ")
    assert (asm.same_candidate, gemm.same_candidate) == (True, False)
    assert (gemm.measurement, asm.lines()[-1][:10], gemm.lines()[-1][:8]) == (
        None,
        "  repeat: ",
        "  anew: ",
    )


@pytest.fixture
def exported(three: Scene, tmp_path: Path) -> Path:
    """Exports of version 3 in the forms that have lines."""
    three.execute(sa.update(models.SolverRow).values(tunable=True, algorithm="Direct"))
    three.execute(sa.update(models.GoldenEntry).values(params="4,4"))
    for form, options in (("find", {}), ("perf", {"text": True}), ("json", {})):
        with reading(three.engine) as connection:
            export_golden(connection, 3, form, tmp_path, arch="gfx90a", num_cu=104, **options)
    return tmp_path


def line_of(path: Path, *texts: str) -> int:
    """The number of the first line of the file that holds all of the texts."""
    lines = path.read_text().splitlines()
    return next(
        number for number, line in enumerate(lines, 1) if all(text in line for text in texts)
    )


def test_a_line_of_an_exported_database_names_its_entry(three: Scene, exported: Path) -> None:
    (config,) = parse_line(A)
    find, perf = exported / "gfx90a68.HIP.fdb.txt", exported / "gfx90a68.db.txt"
    results = exported / "gfx90a68.miopen.results.jsonl"
    packed = exported / "gfx90a68.HIP.fdb.txt.bz2"
    packed.write_bytes(bz2.compress(find.read_bytes()))
    places = {
        find: line_of(find, f"{text_of(config)}="),
        packed: line_of(find, f"{text_of(config)}="),
        perf: line_of(perf, ASM, WINO),
        results: line_of(results, config.key, ASM),
    }
    assert places[find] != line_of(find, f"{text_of(parse_line(B)[0])}=")
    with reading(three.engine) as connection:
        for path, number in places.items():
            (found,) = explain_line(connection, 3, line_names(path, number))
            assert (found.entry.config_key, found.entry.solver) == (config.key, ASM), path
        names = line_names(find, places[find])
        (wino,) = explain_line(connection, 3, names, WINO)
        assert wino.entry.solver == WINO
        with pytest.raises(NotFound, match="no such entry of this line's layer; its solvers are"):
            explain_line(connection, 3, names, "ConvNone")
        with pytest.raises(NotFound, match="no such entry"):
            explain_line(connection, 2, line_names(results, line_of(results, config.key, WINO)))


def test_a_line_is_of_the_device_that_its_file_is_named_after(three: Scene, exported: Path) -> None:
    three.build(4, three.session({(A, ASM): 7.0}, arch="gfx908", num_cu=120), base=3)
    find = exported / "gfx90a68.HIP.fdb.txt"
    number = line_of(find, f"{text_of(parse_line(A)[0])}=")
    with reading(three.engine) as connection:
        (found,) = explain_line(connection, 4, line_names(find, number))
        assert found.entry.arch == "gfx90a"
        other = find.rename(exported / "gfx90878.HIP.fdb.txt")
        (found,) = explain_line(connection, 4, line_names(other, number))
        assert found.entry.arch == "gfx908"
        neither = other.rename(exported / "mine.fdb.txt")
        both = explain_line(connection, 4, line_names(neither, number))
    assert [one.entry.arch for one in both] == ["gfx908", "gfx90a"]


def test_a_line_that_names_nothing_is_refused(exported: Path) -> None:
    find, results = exported / "gfx90a68.HIP.fdb.txt", exported / "gfx90a68.miopen.results.jsonl"
    sqlite = exported / "gfx90a68.db"
    sqlite.write_bytes(b"SQLite format 3\0" + bytes(100))
    other = exported / "notes.txt"
    other.write_text("nothing\n")
    for path, number, said in (
        (find, 99, "has no line 99"),
        (results, 1, "is the header"),
        (sqlite, 1, "."),
        (other, 1, "is not a database that Tuna reads"),
        (exported / "none.txt", 1, "none.txt"),
    ):
        with pytest.raises(BadInput, match=said):
            line_names(path, number)

"""The table of winners on the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import DRIVERS, DatabaseBuilder, memory
from command_lines import Ended

from tuna.cli import report, show
from tuna.exports import ExportReport
from tuna.reports.queries import read_figures
from tuna.reports.report_data import DeviceFigures, ReportFigures


@pytest.fixture(scope="module")
def figures() -> ReportFigures:
    """Two layers with an untuned time, and a session to compare with."""
    with memory().connect() as connection:
        build = DatabaseBuilder(connection)
        session, other = (
            build.session(),
            build.session(library="onednn", reason="vendor", library_version="3.2"),
        )
        for driver, untuned_ms, best_ms in [(DRIVERS[1], 40.0, 2.0), (DRIVERS[2], 20.0, 4.0)]:
            config = build.config(driver)
            build.winner(
                session, config, build.solver("TvmUntuned", algorithm="Baseline"), untuned_ms
            )
            build.winner(session, config, build.solver("Tile"), best_ms)
            build.winner(other, config, build.solver("brgconv", library="onednn"), 3.0)
        build.job(
            session,
            build.config(DRIVERS[5]),
            build.solver("Tile"),
            state="errored",
            cause="run_error",
        )
        return read_figures(connection, session, other)


def test_the_table_has_each_layer_its_gains_and_the_total(
    figures: ReportFigures, capsys: pytest.CaptureFixture[str]
) -> None:
    report.print_winners(figures)
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line.split() for line in lines if "k64 3x3" in line)
    assert first[-9:] == ["1", "Tile", "2.000", "115.6", "–", "20.00×", "1.50×", "0", "0"]
    (failed,) = (line for line in lines if "gemm" in line)
    assert "1 job errored (run_error)" in failed
    (total,) = (line.split() for line in lines if "total: each layer once" in line)
    assert total[-5:] == ["6.000", "55.7", "–", "10.00×", "1.00×"]
    assert (
        lines[-1]
        == "geometric mean of the layers (and of the total): 10.00× (10.00×) over untuned, 1.06×"
        " (1.00×) over onednn 3.2; 1 layer of it has no time"
    )


def test_a_narrow_terminal_shows_the_layer_the_time_and_the_gains(
    figures: ReportFigures, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "terminal_width", lambda: 72)
    report.print_winners(figures)
    head = " ".join(capsys.readouterr().out.split("───")[0].split())
    assert head == "over over layer ms untuned onednn"


def test_words_that_all_layers_share_make_room_for_the_solver(
    figures: ReportFigures, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart named no solver at 80 columns."""
    monkeypatch.setattr(report, "terminal_width", lambda: 80)
    first, second, *_ = figures.layers
    layers = [
        dataclasses.replace(one, label=f"conv 1x1024x14x14 {k} NCHW fp32 F")
        for one, k in ((first, "k256 3x3 s1 p1"), (second, "k2048 1x1 s1 p0"))
    ]
    header = dataclasses.replace(figures.header, against=None)
    total = dataclasses.replace(figures.totals[0], name=f"net {'0123456789abcdef' * 4}")
    report.print_winners(
        dataclasses.replace(figures, header=header, layers=tuple(layers), totals=(total,))
    )
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if "best solver" in line)
    assert "layer, all NCHW fp32 F  " in head
    assert any("k2048 1x1 s1 p0   " in line and "Tile" in line for line in lines)
    assert any("total: net 0123456789ab " in line for line in lines)
    assert max(len(line) for line in lines if line.startswith(" ")) <= 80


def test_what_was_noisy_or_measured_elsewhere_is_said(
    figures: ReportFigures, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.header.against is not None
    against = dataclasses.replace(figures.header.against, differences=("The devices differ.",))
    header = dataclasses.replace(figures.header, noisy=3, against=against)
    first, *rest = figures.layers
    loud = dataclasses.replace(
        first, solvers=(dataclasses.replace(first.solvers[0], noisy=True), *first.solvers[1:])
    )
    report.print_winners(dataclasses.replace(figures, header=header, layers=(loud, *rest)))
    out, err = capsys.readouterr()
    assert out.count("~") == 1
    assert "2.000~" in out
    assert err.splitlines() == [
        "~ 1 time is noisy: the machine was busy while it was measured; 2 of slower solvers too",
        "not like for like: The devices differ.",
    ]


def test_a_share_above_the_peak_is_explained_below_the_table(
    figures: ReportFigures, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what the share is, and why Winograd passes it, was said in the report's page alone."""
    first, *rest = figures.layers
    device = DeviceFigures("cpu", steps=1, busy_s=1.0, span_s=1.0, peak_gflops=246.3)
    (total, *_) = figures.totals
    layers = (dataclasses.replace(first, peak_share=2.91), *rest)
    totals = (dataclasses.replace(total, peak_share=1.66),)
    report.print_winners(
        dataclasses.replace(figures, layers=layers, totals=totals, devices=(device,))
    )
    lines = capsys.readouterr().out.splitlines()
    assert any("291 %*" in line for line in lines)
    assert any("166 %*" in line for line in lines if "total" in line)
    assert (
        "of peak: of the 246.3 GFLOP/s that a loop of fp32 multiply-adds reached on this device"
        in lines
    )
    assert (
        "* above 100 %: GFLOP/s counts the operations of the direct algorithm, and Winograd needs"
        " fewer" in lines
    )


def test_each_sentence_of_several_exports_is_printed_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`tuna tune -o` said up to four times that results are noisy."""
    reports = [
        ExportReport(tmp_path / form, 2, 1, skipped={}, noisy=3, notes={"kernels of Tuna's own": 1})
        for form in ("find", "perf")
    ]
    show.exported(*reports)
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "1 layer: kernels of Tuna's own",
        "noisy: 3 results were measured on a device that was not quiet",
    ]
    assert out.count("2 entries of 1 layer") == 2
    show.exported(*reports, marks=False)
    assert "noisy" not in capsys.readouterr().err


def test_a_session_without_layers_says_so(
    figures: ReportFigures, capsys: pytest.CaptureFixture[str]
) -> None:
    report.print_winners(dataclasses.replace(figures, layers=(), totals=()))
    assert capsys.readouterr().out == "There are no results in this session yet.\n"


def test_the_report_command_prints_the_table_and_then_the_path(
    loaded: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = loaded("tuna", "report", "--session-id", 1, "-o", tmp_path / "r.html")
    assert ended.code == 0, ended
    assert "10 jobs new" in ended.out
    assert ended.out.splitlines()[-1] == str(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    document = json.loads(loaded("tuna", "report", "--session-id", 1, "--json").out)
    assert (len(document["layers"]), document["totals"][0]["missing"]) == (2, 2)
    assert loaded("tuna", "report", "--session-id", 1, "--against", 1).code == 2
    assert loaded("tuna", "report", "--session-id", 1, "--json", "-o", "x.html").code == 2
    assert loaded("tuna", "report", "--session-id", 1).out.splitlines()[-1] == "session-1.html"

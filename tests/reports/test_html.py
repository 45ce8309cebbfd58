"""The report file: self-contained, escaped, stable, valid, and whole or not there."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder, tuned_network
from shared_data import needed_program

from tuna.common import formats
from tuna.db import models
from tuna.errors import NotFound, StorageFull
from tuna.reports import curves, html
from tuna.reports.curves import curve
from tuna.reports.layers import MeasuredTrial, best_so_far
from tuna.reports.queries import read_figures
from tuna.reports.report_data import CurvePoint

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks nesting and collects ids, links and tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.raw: dict[str, list[str]] = {"style": [], "script": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.targets += [
            value or "" for name, value in attrs if name in ("href", "xlink:href", "src")
        ]
        self.text += " "
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]].append(data)
        else:
            self.text += data


def page_of(
    build: DatabaseBuilder, session: int, path: Path, against: int | None = None
) -> tuple[str, Page]:
    """The report's text and what the parser found in it."""
    assert html.write(read_figures(build.connection, session, against), path) == path
    text = path.read_text()
    page = Page(text)
    assert page.open == []
    return text, page


def test_the_report_is_valid_and_needs_nothing_else(build: DatabaseBuilder, tmp_path: Path) -> None:
    text, page = page_of(build, tuned_network(build), tmp_path / "new" / "report.html")
    assert len(page.ids) == len(set(page.ids))
    assert page.targets
    assert all(target.startswith("#") and target[1:] in page.ids for target in page.targets)
    assert not page.tags & {"link", "iframe", "img", "object", "embed", "base"}
    assert not [
        name
        for name, _ in page.attributes
        if name.startswith("on") or name in ("style", "action", "formaction")
    ]
    assert not re.search(r"@import|https?://(?!www\.w3\.org)", text)
    assert "url(" not in text


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    _, page = page_of(build, tuned_network(build), tmp_path / "r.html")
    policy = next(
        value or ""
        for name, value in page.attributes
        if name == "content" and "default-src" in (value or "")
    )
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert (allowed["default-src"], allowed["base-uri"], allowed["form-action"]) == ("'none'",) * 3
    for tag in ("style", "script"):
        (text,) = page.raw[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(
        r"\b(eval|Function|fetch|XMLHttpRequest|innerHTML|localStorage|import)\b",
        page.raw["script"][0],
    )


def test_what_the_database_says_cannot_become_markup(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session = tuned_network(build)
    _, before = page_of(build, session, tmp_path / "r.html")
    evil = "\"'></script><script>alert(1)</script>&amp;{{ 7 * 7 }}"
    for column in (
        models.Session.reason,
        models.EnvironmentRow.device,
        models.ConfigRow.label,
        models.ConfigRow.driver,
        models.SolverRow.name,
        models.StepResultRow.output_tail,
        models.TrialRow.output_tail,
        models.TrialRow.params,
        models.FindDb.params,
    ):
        rows = sa.update(column.class_)
        if column.class_ is models.SolverRow:  # whose names differ
            rows = rows.where(models.SolverRow.id == 2)
        build.connection.execute(rows.values({column: evil}))
    text, page = page_of(build, session, tmp_path / "r.html")
    assert page.text.count(evil) > 10
    assert page.raw["script"] == before.raw["script"]
    assert len(page.raw["script"]) == text.count("</script>") == 1
    assert dict(page.attributes).keys() == dict(before.attributes).keys()


def test_the_script_can_be_parsed() -> None:
    path = Path(html.__file__).with_name("report.js")
    subprocess.run([needed_program("node"), "--check", str(path)], check=True, timeout=60)


def test_two_reports_are_the_same(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = tuned_network(build)
    assert (
        page_of(build, session, tmp_path / "a.html")[0]
        == page_of(build, session, tmp_path / "b.html")[0]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_every_layer_is_listed_and_what_failed_says_so(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    text, page = page_of(build, tuned_network(build), tmp_path / "r.html")
    labels = build.connection.execute(sa.select(models.ConfigRow.label)).scalars().all()
    assert all(page.text.count(label) >= 1 for label in labels)
    assert "no winner: 3 jobs errored (run error)" in page.text
    assert 'error: "tile size" <script>alert(1)</script> & no register left' in page.text
    assert "tuna reproduce --library tvm --step eval" in page.text
    assert text.count('<svg class="curve"') == 5


def test_params_of_winners_are_short_at_first_and_whole_on_demand(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session = tuned_network(build)
    build.connection.execute(sa.update(models.FindDb).values(params="tile=8,<b>"))
    _, page = page_of(build, session, tmp_path / "r.html")
    winners = build.connection.execute(
        sa.select(sa.func.count()).select_from(models.FindDb)
    ).scalar_one()
    assert page.text.count("tile=8,<b>") == winners > 0
    assert "characters" not in page.text
    build.connection.execute(sa.update(models.FindDb).values(params="tile=8," * 1000))
    _, page = page_of(build, session, tmp_path / "r.html")
    assert page.text.count("The winner's params, 7,000 characters") == 5
    assert page.text.count("tile=8," * 1000) == 5
    build.connection.execute(sa.update(models.FindDb).values(params="tile=8," * 5000))
    _, page = page_of(build, session, tmp_path / "r.html")
    assert page.text.count(f"First {html.MAX_PARAMS} of 35000 characters") == 5
    assert "tile=8," * 3000 not in page.text


def test_gains_and_totals_lead_the_page(build: DatabaseBuilder, tmp_path: Path) -> None:
    session, other = (
        build.session(),
        build.session(library="onednn", reason="vendor", device="another CPU"),
    )
    for driver, untuned_ms, best_ms, other_ms in [
        (DRIVERS[1], 40.0, 2.0, 3.0),
        (DRIVERS[2], 20.0, 4.0, 2.0),
    ]:
        config = build.config(driver)
        build.winner(session, config, build.solver("TvmUntuned", algorithm="Baseline"), untuned_ms)
        build.winner(session, config, build.solver("Tile"), best_ms)
        build.winner(other, config, build.solver("brgconv", library="onednn"), other_ms)
    _, page = page_of(build, session, tmp_path / "r.html", against=other)
    words = " ".join(page.text.split())
    assert "Speed over untuned 10.00× geometric mean of 2 layers; 10.00× in total" in words
    assert (
        "Speed over onednn 0.27.0.post1 0.87× geometric mean of 2 layers; 0.83× in total" in words
    )
    assert "Each layer once 6.000 ms 2 calls of 2 layers" in words
    assert (
        "measured on different devices (session 1: AMD EPYC 9B45; session 2: another CPU)" in words
    )
    assert (
        "behind"
        in dict(
            page.attributes[i]
            for i in range(len(page.attributes))
            if page.attributes[i][0] == "data-f"
        )["data-f"]
    )


def test_one_layer_is_not_called_layers(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = build.session()
    config = build.config(DRIVERS[1])
    build.winner(session, config, build.solver("TvmUntuned", algorithm="Baseline"), 40.0)
    build.winner(session, config, build.solver("Tile"), 2.0)
    _, page = page_of(build, session, tmp_path / "r.html")
    assert "geometric mean of 1 layer; 20.00× in total" in " ".join(page.text.split())


def test_of_many_layers_only_the_longest_have_details(
    build: DatabaseBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tuned_network(build)
    monkeypatch.setattr(html, "MAX_DETAILS", 2)
    text, page = page_of(build, session, tmp_path / "r.html")
    assert "Details are given for the 2 layers that take the longest" in page.text
    assert text.count("<summary>") - text.count("<summary>The winner's") == 2
    assert text.count('scope="row">conv') == 5
    assert all(target[1:] in page.ids for target in page.targets)


def test_a_session_without_results_says_so(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = build.session()
    assert (
        "There are no results in this session yet."
        in page_of(build, session, tmp_path / "r.html")[1].text
    )
    build.job(session, build.config(DRIVERS[0]), build.solver("A"), state="new")
    _, page = page_of(build, session, tmp_path / "r.html")
    assert "There are no results in this session yet." in page.text
    assert "no winner: 1 job new" in page.text


def test_an_unknown_session_writes_nothing(build: DatabaseBuilder, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        page_of(build, 5, tmp_path / "a" / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_older_report(
    build: DatabaseBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageFull):
        page_of(build, build.session(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def search(times: Sequence[float]) -> tuple[CurvePoint, ...]:
    """A search with these times."""
    return best_so_far([MeasuredTrial(number, time_ms) for number, time_ms in enumerate(times)])


def test_curves_of_one_or_of_very_many_trials_can_be_drawn() -> None:
    one = curve({"A": search([1.5])})
    (series,) = one.series
    assert (len(series.dots), one.trials, one.best_ms, one.left_out) == (1, 1, 1.5, 0)
    assert series.end is not None
    assert (series.end, series.line) == (
        series.dots[0],
        f"M{series.end.x},{series.end.y}H{series.end.x}",
    )
    many = curve({"A": search([1000.0 / (1 + number) for number in range(20_000)])})
    assert many.trials == 20_000
    assert len(many.series[0].dots) <= 241
    assert many.left_out == sum(1000.0 / (1 + number) > 1.08 for number in range(20_000))
    assert many.series[0].line.count("V") == 19_999 - many.left_out, (
        "the line has every step in the field"
    )


def test_curves_stay_in_their_field_and_end_at_the_best_time() -> None:
    drawn = curve(
        {"A": search([9.0, 4.0, 5.0, 2.0, 400.0, 2.5]), "B": search([8.0, 8.5])},
        {"untuned": 30.0, "far": 900.0},
    )
    dots = [dot for series in drawn.series for dot in series.dots]
    xs, ys = [float(dot.x) for dot in dots], [float(dot.y) for dot in dots]
    assert (len(dots), drawn.left_out) == (7, 1)
    assert curves.LEFT <= min(xs) < max(xs) <= curves.RIGHT
    assert curves.TOP <= min(ys) < max(ys) <= curves.BOTTOM
    first = drawn.series[0]
    assert first.end is not None
    assert float(first.end.y) == max(ys), "larger is lower, and lower is faster"
    heights = [float(number) for number in re.findall(r"[V,]([\d.]+)", first.line)]
    assert heights == sorted(heights), "the best time never grows"
    assert first.line.count("V") == 2
    assert [level.label for level in drawn.levels] == ["untuned"]


def test_a_dot_says_which_trial_it_is(build: DatabaseBuilder, tmp_path: Path) -> None:
    session, config = build.session(), build.config(DRIVERS[1])
    job = build.job(session, config, build.solver("Tile"))
    build.trial(job, 0, 2.0, params="tile=4")
    build.trial(job, 1, 1.0, params="tile=8")
    build.winner(session, config, build.solver("Tile"), 1.0, job, trial_number=1)
    text, _ = page_of(build, session, tmp_path / "r.html")
    assert "<title>Tile #1: 1.000 ms\ntile=8</title>" in text


@pytest.mark.parametrize(
    ("high", "gaps", "whole", "expected"),
    [
        (2, 5, True, [0, 1, 2]),
        (6, 5, True, [0, 2, 4, 6]),
        (1000, 5, True, [0, 200, 400, 600, 800, 1000]),
        (1.0, 4, False, [0, 0.5, 1.0]),
        (0.0173, 4, False, [0, 0.005, 0.01, 0.015]),
    ],
)
def test_marks_of_an_axis_are_round_numbers(
    high: float, gaps: int, whole: bool, expected: list[float]
) -> None:
    assert curves.ticks(high, gaps, whole=whole) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.011, 0.0173, ["0.012", "0.014", "0.016"]),
        (5.1, 6.9, ["5.5", "6.0", "6.5"]),
        (900.0, 9000.0, ["1,000", "2,000", "5,000"]),
        (0.003, 0.06, ["0.005", "0.01", "0.02", "0.05"]),
    ],
)
def test_marks_of_times_are_round_and_can_be_told_apart(
    low: float, high: float, expected: list[str]
) -> None:
    assert [text for _, text in curves.time_ticks(low, high)] == expected


def test_a_curve_says_in_words_what_it_shows(build: DatabaseBuilder, tmp_path: Path) -> None:
    text, page = page_of(build, tuned_network(build), tmp_path / "r.html")
    assert (
        page.text.count("Time of each trial and the best so far, by solver")
        == text.count('<svg class="curve"')
        == 5
    )
    named = [
        value.split() for name, value in page.attributes if name == "aria-labelledby" and value
    ]
    assert len(named) == 5
    assert {one for ids in named for one in ids} <= set(page.ids)
    assert not re.search(r'(fill|stroke)="', text), "all colours are the page's"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.milliseconds(1234.5678, 3), "1,234.568"),
        (formats.milliseconds(None, 3), "–"),
        (formats.gflops(1234.56), "1,234.6"),
        (formats.percent(0.4149), "41 %"),
        (formats.percent(0.0321), "3.2 %"),
        (formats.percent(0.0), "0 %"),
        (formats.percent(1.0), "100 %"),
        (formats.factor(1.836), "1.84×"),
        (formats.spread(0.0152), "±1.5 %"),
        (formats.spread(0.2), "±20 %"),
        (formats.size(0), "0 B"),
        (formats.size(13_714_688), "13.1 MiB"),
        (formats.size(2**50), "1.0 PiB"),
        (formats.duration(59.94), "59.9 s"),
        (formats.duration(59.999), "1 min 0 s"),
        (formats.duration(441.0), "7 min 21 s"),
        (formats.duration(7260.0), "2 h 1 min"),
        (formats.duration(200_000.0), "2 d 7 h"),
        (formats.moment(datetime(2026, 3, 2, 9, 30, tzinfo=timezone.utc)), "2026-03-02 09:30 UTC"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("times", "decimals"), [([], 3), ([2.5, 90.0], 3), ([0.0733], 4), ([1e-9, 5.0], 6)]
)
def test_one_number_of_decimals_shows_the_shortest_time(times: list[float], decimals: int) -> None:
    assert formats.decimals_for(times) == decimals

"""The report file: self-contained, escaped, stable, valid, and whole or not there."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder, tuned_network

from tuna.db import models
from tuna.errors import BadInput, NotFound, StorageFull
from tuna.reports import curves, html
from tuna.reports.curves import curve
from tuna.reports.html import write_report
from tuna.reports.queries import best_so_far

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
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.targets += [value or "" for name, value in attrs if name in ("href", "xlink:href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def page_of(build: DatabaseBuilder, session: int, path: Path) -> tuple[str, Page]:
    """The report's text and what the parser found in it."""
    assert write_report(build.connection, session, path) == path
    text = path.read_text()
    page = Page(text)
    assert page.open == []
    return text, page


def test_the_report_is_valid_and_needs_nothing_else(build: DatabaseBuilder, tmp_path: Path) -> None:
    text, page = page_of(build, tuned_network(build), tmp_path / "new" / "report.html")
    assert len(page.ids) == len(set(page.ids))
    assert page.targets
    assert all(target.startswith("#") and target[1:] in page.ids for target in page.targets)
    assert not page.tags & {"script", "link", "iframe", "img", "object", "embed"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"@import|https?://(?!www\.w3\.org)", text)
    assert "url(" not in text


def test_what_solvers_printed_cannot_become_markup(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = tuned_network(build)
    evil = "\"><script>alert('x')</script>&amp;{{ 7 * 7 }}"
    build.connection.execute(sa.update(models.Session).values(reason=evil))
    build.connection.execute(sa.update(models.Environment).values(flags={evil: evil}, device=evil))
    build.connection.execute(sa.update(models.Config).values(label=evil))
    build.connection.execute(sa.update(models.Solver).where(models.Solver.id == 1).values(name=evil))
    build.connection.execute(sa.update(models.StepResult).values(output_tail=evil, reproduce=evil))
    build.connection.execute(sa.update(models.Trial).values(output_tail=evil))
    _, page = page_of(build, session, tmp_path / "r.html")
    assert "script" not in page.tags
    assert page.text.count(evil) > 10


def test_two_reports_are_the_same(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = tuned_network(build)
    assert page_of(build, session, tmp_path / "a.html")[0] == page_of(build, session, tmp_path / "b.html")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_every_layer_is_listed_and_what_failed_says_so(build: DatabaseBuilder, tmp_path: Path) -> None:
    text, page = page_of(build, tuned_network(build), tmp_path / "r.html")
    labels = build.connection.execute(sa.select(models.Config.label)).scalars().all()
    assert all(page.text.count(label) >= 2 for label in labels)
    assert "no winner: 3 jobs errored (run error)" in page.text
    assert 'error: "tile size" <script>alert(1)</script> & no register left' in page.text
    assert "tuna reproduce --library tvm --step eval" in page.text
    assert text.count("<svg") == 5


def test_params_of_winners_are_shown_cut_where_they_are_long(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = tuned_network(build)
    build.connection.execute(sa.update(models.FindDb).values(params="tile=8,<b>"))
    _, page = page_of(build, session, tmp_path / "r.html")
    winners = build.connection.execute(sa.select(sa.func.count()).select_from(models.FindDb)).scalar_one()
    assert page.text.count("tile=8,<b>") == winners > 0
    assert "characters, all of them" not in page.text
    build.connection.execute(sa.update(models.FindDb).values(params="tile=8," * 1000))
    _, page = page_of(build, session, tmp_path / "r.html")
    assert page.text.count("7,000 characters, all of them in tuna report --json") == winners
    assert "tile=8," * 72 not in page.text


def test_a_session_without_results_says_so(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = build.session()
    assert "There are no results in this session yet." in page_of(build, session, tmp_path / "r.html")[1].text
    build.job(session, build.config(DRIVERS[0]), build.solver("A"), state="new")
    _, page = page_of(build, session, tmp_path / "r.html")
    assert "There are no results in this session yet." in page.text
    assert "no winner: 1 job new" in page.text


def test_an_unknown_session_writes_nothing(build: DatabaseBuilder, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        write_report(build.connection, 5, tmp_path / "a" / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_bad_input(build: DatabaseBuilder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        write_report(build.connection, build.session(), tmp_path / "file" / "r.html")


def test_a_full_disk_keeps_the_older_report(
    build: DatabaseBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageFull):
        write_report(build.connection, build.session(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_curves_of_one_or_of_very_many_trials_can_be_drawn() -> None:
    one = curve(best_so_far([(None, 0, 1.5)]))
    assert (len(one.dots), one.trials, one.best_ms) == (1, 1, 1.5)
    assert (one.end, one.line) == (one.dots[0], f"M{one.end.x},{one.end.y}H{one.end.x}")
    many = curve(best_so_far([(None, number, 1000.0 / (1 + number)) for number in range(20_000)]))
    assert many.trials == 20_000
    assert len(many.dots) <= 401
    assert many.line.count("V") == 19_999, "the line has every step"


def test_a_curve_stays_in_its_field_and_ends_at_the_best_time() -> None:
    times = [9.0, 4.0, 5.0, 2.0, 40.0, 2.5]
    drawn = curve(best_so_far([(None, number, time_ms) for number, time_ms in enumerate(times)]))
    xs, ys = [float(dot.x) for dot in drawn.dots], [float(dot.y) for dot in drawn.dots]
    assert len(drawn.dots) == 4, "9 ms and 40 ms are far above the line"
    assert curves.LEFT <= min(xs) < max(xs) <= curves.RIGHT
    assert curves.TOP <= min(ys) < max(ys) <= curves.BOTTOM
    assert float(drawn.end.y) == max(ys), "larger is lower, and lower is faster"
    heights = [float(number) for number in re.findall(r"[V,]([\d.]+)", drawn.line)]
    assert heights == sorted(heights), "the best time never grows"
    assert min(heights) >= curves.TOP
    assert drawn.line.count("V") == 2


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
def test_marks_of_an_axis_are_round_numbers(high: float, gaps: int, whole: bool, expected: list[float]) -> None:
    assert curves.ticks(high, gaps, whole=whole) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("high", "expected"),
    [(0.0173, ["0.000", "0.005", "0.010", "0.015"]), (9000.0, ["0", "5,000"]), (3.0, ["0", "1", "2", "3"])],
)
def test_marks_say_just_what_tells_them_apart(high: float, expected: list[str]) -> None:
    assert [curves.label(value, high) for value in curves.ticks(high, 4)] == expected


def test_a_curve_says_in_words_what_it_shows(build: DatabaseBuilder, tmp_path: Path) -> None:
    text, page = page_of(build, tuned_network(build), tmp_path / "r.html")
    assert page.text.count("Time of each trial and the best so far") == text.count("<svg") == 5
    named = [value.split() for name, value in page.attributes if name == "aria-labelledby" and value]
    assert len(named) == 5
    assert {one for ids in named for one in ids} <= set(page.ids)
    assert not re.search(r'(fill|stroke)="(?!var\(|none)', text), "all colours are the page's"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (html.milliseconds(1234.5678, 3), "1,234.568"),
        (html.milliseconds(None, 3), "–"),
        (html.gflops(1234.56), "1,234.6"),
        (html.percent(0.4149), "41 %"),
        (html.percent(0.0321), "3.2 %"),
        (html.percent(0.0), "0 %"),
        (html.percent(1.0), "100 %"),
        (html.factor(1.836), "1.84×"),
        (html.size(0), "0 B"),
        (html.size(13_714_688), "13.1 MiB"),
        (html.size(2**50), "1048576.0 GiB"),
        (html.duration(59.94), "59.9 s"),
        (html.duration(59.999), "1 min 0 s"),
        (html.duration(441.0), "7 min 21 s"),
        (html.duration(7260.0), "2 h 1 min"),
        (html.duration(200_000.0), "2 d 7 h"),
        (html.moment(datetime(2026, 3, 2, 9, 30, tzinfo=timezone.utc)), "2026-03-02 09:30 UTC"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(("times", "decimals"), [([], 3), ([2.5, 90.0], 3), ([0.0733], 4), ([1e-9, 5.0], 6)])
def test_one_number_of_decimals_shows_the_shortest_time(times: list[float], decimals: int) -> None:
    assert html.decimals_for(times) == decimals

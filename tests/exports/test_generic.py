"""JSON and CSV: whole results of every library and kind, from sessions and golden versions, and
back."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DRIVERS, START, DatabaseBuilder, tuned_network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queries import read_rows

from tuna.configs import parse_line
from tuna.db import models
from tuna.db.engine import reading, writing
from tuna.errors import BadInput
from tuna.exports import export, export_golden
from tuna.exports.csv_table import CsvExporter
from tuna.exports.importer import import_db
from tuna.exports.json_lines import JsonExporter
from tuna.libraries.miopen.formats.find_db import time_text
from tuna.libraries.results import ResultEnvironment, ResultRecord, Spread, is_time
from tuna.results.whole_results import spread_of
from tuna.vocabulary import BASELINE

JSON, CSV = JsonExporter(), CsvExporter()
BOTH = [JSON, CSV]

texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
) | st.sampled_from(["=1+1", "'", "''x", "-1", "@a", "\t", "\r\n", 'a,"b"', "＝1", "nan", "\u2028"])
times = st.floats(1e-6, 8e7)
counts = st.integers(0, 2**62)
moments = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(timezone.utc))
environments = st.builds(
    ResultEnvironment,
    *[texts] * 4,
    st.integers(0, 999),
    *[texts] * 3,
    *[st.dictionaries(texts, texts, max_size=3)] * 2,
)
spreads = st.builds(Spread, times, times, st.floats(0, 1e30), st.integers(1, 99))
records = st.builds(
    ResultRecord,
    *[texts] * 8,
    st.none() | times,
    st.none() | spreads,
    st.none() | st.floats(0, 1),
    counts,
    *[st.booleans()] * 2,
    st.sampled_from(("", "wall", "cpu", "own")),
    environments,
    counts,
    *[st.none() | counts] * 2,
    *[texts] * 2,
    st.none() | moments,
    st.none() | texts,
    *[st.none()] * 3,  # not in these forms
)


@pytest.mark.parametrize("exporter", BOTH)
@given(found=st.lists(records, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_records_read_back(
    tmp_path: Path, exporter: JsonExporter | CsvExporter, found: list[ResultRecord]
) -> None:
    assert exporter.write_records(tmp_path / "x", found) == len(found)
    assert list(exporter.read(tmp_path / "x")) == found
    before = (tmp_path / "x").read_bytes()
    exporter.write_records(tmp_path / "x", found)
    assert (tmp_path / "x").read_bytes() == before


@given(st.floats(allow_nan=True))
def test_a_time_is_what_a_find_db_can_hold(time_ms: float) -> None:
    assert is_time(time_ms) == (time_text(time_ms) is not None)


@pytest.mark.parametrize("time_ms", [5e-324, 9.99e-7, 1e-6, 8.64e7, 8.65e7, 1e308, 0.0])
def test_the_limits_of_a_time_are_those_of_single_precision(time_ms: float) -> None:
    assert is_time(time_ms) == (time_text(time_ms) is not None)


def test_the_spread_is_that_of_the_repeats() -> None:
    assert spread_of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(1.0, 3.0, 2.0, 5)
    assert spread_of([1.0, 2.0]) == Spread(1.0, 1.5, 0.5, 2)
    assert spread_of([7.0]) == Spread(7.0, 7.0, 0.0, 1)
    assert spread_of([0.0, float("inf")]) is None


@pytest.mark.parametrize("exporter", BOTH)
def test_a_session_is_exported_whole(
    build: DatabaseBuilder, tmp_path: Path, exporter: JsonExporter | CsvExporter
) -> None:
    session = tuned_network(build)
    report = export(build.connection, session, exporter.form, tmp_path)
    rows = list(exporter.read(report.path))
    gemm = parse_line(DRIVERS[5])[0]
    (row,) = [row for row in rows if row.kind == "gemm"]
    assert (row.config, row.config_key, row.label) == (gemm.driver(), gemm.key, gemm.label)
    assert (row.solver, row.family, row.algorithm) == ("TvmGemm", "GEMM", "GEMM")
    assert row.spread is not None
    assert row.spread.repeats == 3
    assert row.spread.min_ms == (row.time_ms or 0) * 0.99
    assert (row.worker, row.device) == ("eval@tuner-1", "znver5 cpu0@tuner-1")
    assert row.measured_at is not None
    assert row.measured_at > START
    assert row.job_id is not None
    assert (row.session_id, row.imported_from, row.simulated) == (session, None, False)
    assert row.environment.arch == "znver5"
    assert row.environment.flags == {"threads": "1"}
    assert len(rows) == report.entries == 13


def test_a_baseline_is_a_result_only_where_it_is_the_only_one(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session, tuned = build.session(), build.solver("TvmConvTile")
    untuned = build.solver("TvmUntuned", algorithm=BASELINE)
    # even where it seems the faster
    for driver, times in ((DRIVERS[1], (0.5, 3.0)), (DRIVERS[2], (0.5, None))):
        build.winner(session, build.config(driver), untuned, times[0])
        if times[1]:
            build.winner(session, build.config(driver), tuned, times[1])
    rows = list(JsonExporter().read(export(build.connection, session, "json", tmp_path).path))
    assert {(row.config, row.solver) for row in rows} == {
        (parse_line(DRIVERS[1])[0].driver(), "TvmConvTile"),
        (parse_line(DRIVERS[2])[0].driver(), "TvmUntuned"),
    }


def test_the_winners_error_goes_with_it(build: DatabaseBuilder, tmp_path: Path) -> None:
    session, config, solver = build.session(), build.config(DRIVERS[1]), build.solver("TvmConvTile")
    job = build.job(session, config, solver)
    build.trial(job, 0, 2.0, max_error=3e-7)
    build.winner(session, config, solver, 2.0, job)
    for exporter in BOTH:
        (row,) = exporter.read(export(build.connection, session, exporter.form, tmp_path).path)
        assert row.max_error == 3e-7


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_tag_and_top_limit_the_rows(build: DatabaseBuilder, tmp_path: Path, form: str) -> None:
    session = tuned_network(build, trials=6)
    build.insert(models.ConfigTag, tag="one", config_id=build.config(DRIVERS[1]), recurrent=False)
    assert export(build.connection, session, form, tmp_path, config_tag="one").entries == 3
    assert export(build.connection, session, form, tmp_path, config_tag="one", top=2).entries == 2


def golden(build: DatabaseBuilder, units: tuple[int, ...] = (104, 110)) -> int:
    """A golden version of one layer on devices with so many CUs, from a session that still has the
    first's result."""
    version = build.insert(models.Golden, library="miopen", version=1, state="promoted")
    config, solver = build.config(DRIVERS[1]), build.solver("ConvAsm3x3U", "miopen")
    for number, num_cu in enumerate(units):
        session = build.session("miopen", "gfx90a", num_cu)
        job = build.job(session, config, solver)
        build.trial(job, 4, 0.5, params="9")
        build.winner(
            session, config, solver, 0.5 if number == 0 else 99.0, job, trial_number=4, params="9"
        )
        environment = sa.select(models.Session.environment_id).where(models.Session.id == session)
        build.insert(
            models.GoldenEntry,
            golden_id=version,
            arch="gfx90a",
            num_cu=num_cu,
            config_id=config,
            solver_id=solver,
            session_id=session,
            environment_id=build.connection.execute(environment).scalar_one(),
            time_ms=0.5,
            workspace_bytes=64,
            params="9",
            algorithm="",
            worker="w",
            device="card",
            measured_at=START + timedelta(days=number),
        )
    return 1


@pytest.mark.parametrize("exporter", BOTH)
def test_a_golden_version_is_exported_with_all_its_devices(
    build: DatabaseBuilder, tmp_path: Path, exporter: JsonExporter | CsvExporter
) -> None:
    version = golden(build)
    rows = list(
        exporter.read(
            export_golden(
                build.connection, version, exporter.form, tmp_path / "all", arch="gfx90a"
            ).path
        )
    )
    assert sorted(row.environment.num_cu for row in rows) == [104, 110]
    by_cu = {row.environment.num_cu: row for row in rows}
    assert (by_cu[104].trial_number, by_cu[104].worker, by_cu[104].device) == (4, "w", "card")
    assert by_cu[104].spread is not None
    # The session has another result by now, so nothing is said of how this one was measured.
    assert (by_cu[110].job_id, by_cu[110].trial_number, by_cu[110].spread) == (None, None, None)
    one = export_golden(
        build.connection, version, exporter.form, tmp_path, arch="gfx90a", num_cu=110
    )
    assert [row.environment.num_cu for row in exporter.read(one.path)] == [110]
    assert one.path.name.startswith("gfx90a6e.miopen.results.")


def test_sqlite_and_mariadb_give_the_same_rows_in_the_same_order(
    engine: sa.Engine, tmp_path: Path
) -> None:
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session, version = tuned_network(build, trials=6), golden(build)
    with reading(engine) as connection:
        paths = [
            export(connection, session, "json", tmp_path).path,
            export_golden(connection, version, "json", tmp_path, arch="gfx90a").path,
        ]
    found = [list(JSON.read(path)) for path in paths]
    assert [len(rows) for rows in found] == [13, 2]
    for rows in found:
        order = [(row.config_key, row.environment.key, row.time_ms, row.solver) for row in rows]
        assert order == sorted(order)
        assert all(row.measured_at is not None for row in rows)
    assert {row.worker for row in found[0]} == {"eval@tuner-1"}


def test_a_perf_db_of_a_golden_version_for_one_device_is_written(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    report = export_golden(
        build.connection, golden(build), "perf", tmp_path, arch="gfx90a", num_cu=104
    )
    assert (report.path.name, report.entries) == ("gfx90a68.db", 1)


@pytest.mark.parametrize("form", ["json", "csv"])
def test_an_export_is_imported_into_another_session(
    engine: sa.Engine, tmp_path: Path, form: str
) -> None:
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session = build.session("miopen", "gfx90a", 104)
        solver = build.solver("ConvAsm3x3U", "miopen", "Direct")
        for number, driver in enumerate(DRIVERS, 1):
            build.winner(
                session,
                build.config(driver),
                solver,
                number / 3,
                params=f"{number}",
                workspace_bytes=number,
            )
        other = build.session("miopen", "gfx90a", 104, "other")
    with reading(engine) as connection:
        path = export(connection, session, form, tmp_path / "1").path
        find = export(connection, session, "find", tmp_path / "1").path.read_bytes()
    report = import_db(engine, path, other)
    assert (report.rows, report.changed, report.new_configs, report.skipped) == (6, 6, 0, {})
    assert import_db(engine, path, other).changed == 0
    with reading(engine) as connection:
        assert export(connection, other, "find", tmp_path / "2").path.read_bytes() == find


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_result_under_the_key_of_another_layer_is_left_out(
    sqlite_engine: sa.Engine, tmp_path: Path, form: str
) -> None:
    with writing(sqlite_engine) as connection:
        build = DatabaseBuilder(connection)
        session, other = build.session(), build.session(reason="other")
        for driver in DRIVERS[:2]:
            build.winner(session, build.config(driver), build.solver("A"), 1.0)
        first, second = (parse_line(driver)[0] for driver in DRIVERS[:2])
    with reading(sqlite_engine) as connection:
        path = export(connection, session, form, tmp_path).path
    path.write_text(path.read_text().replace(first.key, second.key))
    report = import_db(sqlite_engine, path, other)
    assert (report.rows, report.skipped) == (1, {"its key is not that of its config": 1})
    key = sa.select(models.ConfigRow.key).join(models.FindDb)
    assert read_rows(sqlite_engine, key.where(models.FindDb.session_id == other)) == [(second.key,)]


def test_simulated_results_are_not_imported(engine: sa.Engine, tmp_path: Path) -> None:
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session = build.session("miopen", "gfx90a", 104)
        build.winner(session, build.config(DRIVERS[0]), build.solver("A", "miopen"), 1.0)
    with reading(engine) as connection:
        path = export(connection, session, "json", tmp_path).path
    path.write_text(path.read_text().replace('"simulated":false', '"simulated":true'))
    report = import_db(engine, path, session)
    assert (report.rows, report.skipped) == (0, {"its time is simulated": 1})


LINE = {
    "version": '{"format":"tuna-results","version":2}\n',
    "field": '{"format":"tuna-results","version":1}\n{"solver":"A"}\n',
    "cut": '{"format":"tuna-results","version":1}\n{"solver"',
    "list": '{"format":"tuna-results","version":1}\n[]\n',
}


@pytest.mark.parametrize("name", LINE)
def test_a_damaged_json_file_names_its_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text(LINE[name])
    with pytest.raises(BadInput, match=f"x:{1 if name == 'version' else 2}: "):
        list(JSON.read(tmp_path / "x"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\r\n1,", "\r\n2,"),
        (",false,", ",no,"),
        (",104,", ",1_0,"),
        ("0.5", "nan"),
        ('{""threads', '{[""threads'),
        ("version", "v"),
    ],
)
def test_a_damaged_csv_file_is_refused(
    build: DatabaseBuilder, tmp_path: Path, old: str, new: str
) -> None:
    path = export_golden(build.connection, golden(build), "csv", tmp_path, arch="gfx90a").path
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode())
    with pytest.raises(BadInput, match=r"results\.csv"):
        list(CSV.read(path))


def test_a_json_number_is_written_as_it_reads_back(build: DatabaseBuilder, tmp_path: Path) -> None:
    path = export_golden(build.connection, golden(build), "json", tmp_path, arch="gfx90a").path
    line = json.loads(path.read_text().splitlines()[1])
    assert line["time_ms"] == 0.5
    assert line["environment"]["key"]


@pytest.mark.parametrize("moment", ["2024-01-01T00:00:00", "1700000000", "yesterday"])
@pytest.mark.parametrize("exporter", BOTH)
def test_only_iso_8601_with_a_zone_is_a_time(
    build: DatabaseBuilder, tmp_path: Path, exporter: JsonExporter | CsvExporter, moment: str
) -> None:
    path = export_golden(
        build.connection, golden(build, (104,)), exporter.form, tmp_path, arch="gfx90a"
    ).path
    (row,) = exporter.read(path)
    assert row.measured_at is not None
    text = path.read_text()
    assert row.measured_at.isoformat() in text
    path.write_text(text.replace(row.measured_at.isoformat(), moment))
    with pytest.raises(BadInput, match=r":2: provenance.measured_at: "):
        list(exporter.read(path))


def test_an_environment_of_json_lines_names_its_fields(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    path = export_golden(build.connection, golden(build), "json", tmp_path, arch="gfx90a").path
    header, text, *_ = path.read_text().splitlines()
    line = json.loads(text)
    line["environment"] = list(line["environment"].values())
    path.write_text(f"{header}\n{json.dumps(line)}\n")
    with pytest.raises(BadInput, match=r":2: environment: "):
        list(JSON.read(path))

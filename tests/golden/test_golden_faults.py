"""Atomicity of golden versions: crashes, concurrent builds, many results."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from golden_scene import ASM, GEMM, A, B, C, Scene
from queries import execute
from shared_data import DRILLS

from tuna.db import models
from tuna.db.engine import make_engine
from tuna.golden import GoldenExists, SessionChanged, promote

ROWS = 5000 if DRILLS == 1 else 20_000
#: Tens of seconds on an idle machine; a query without its index takes hours.
_BUILD_S = 60.0
_KILLED = """
import os, signal, sys
import sqlalchemy as sa
from tuna.db.engine import make_engine
from tuna.golden import build

engine, session, die_at = make_engine(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
writes = 0

@sa.event.listens_for(engine, "after_cursor_execute")
def _die(connection, cursor, statement, parameters, context, many):
    global writes
    writes += statement.startswith(("INSERT", "UPDATE", "DELETE"))
    if writes == die_at:
        os.kill(os.getpid(), signal.SIGKILL)

build(engine, version=2, session_id=session, base_version=1, overwrite=True)
"""


class Broken(Exception):
    """Injected error."""


def _on_write(
    engine: sa.Engine, act: Callable[[int, str], None], when: str = "after_cursor_execute"
) -> Callable[[], None]:
    """Call `act(number, statement)` at each writing statement; returns a function that stops it."""
    count = 0

    def listen(_: Any, __: Any, statement: str, *___: Any) -> None:
        nonlocal count
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            count += 1
            act(count, statement)

    sa.event.listen(engine, when, listen)
    return lambda: sa.event.remove(engine, when, listen)


def _versions(scene: Scene) -> int:
    """Create version 1, with kernels, and a session for version 2; returns the session's id."""
    row = {"time_ms": 1.0, "code": [b"code"]}
    scene.build(1, scene.session({(A, ASM): row, (B, ASM): row, (C, ASM): row}))
    return scene.session({(A, ASM): {"time_ms": 0.5, "code": [b"newer"]}, (A, GEMM): 2.0})


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_build_that_breaks_at_any_statement_leaves_nothing(scene: Scene, overwrite: bool) -> None:
    session = _versions(scene)
    if overwrite:
        scene.build(2, base=1)
    before = scene.everything()

    def statements() -> int:
        seen: list[str] = []
        stop = _on_write(scene.engine, lambda _, statement: seen.append(statement))
        try:
            scene.build(2, session, base=1, overwrite=overwrite)
        finally:
            stop()
        return len(seen)

    for number in range(1, 10 if overwrite else 6):

        def break_it(at: int, _: str, number: int = number) -> None:
            if at == number:
                raise Broken

        stop = _on_write(scene.engine, break_it)
        with pytest.raises(Broken):
            scene.build(2, session, base=1, overwrite=overwrite)
        stop()
        assert scene.everything() == before
    assert statements() == (9 if overwrite else 5)  # all statements were covered above


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("die_at", [1, 3, 5])
def test_a_build_that_is_killed_leaves_nothing(
    scene: Scene, die_at: int, eventually: Callable[[Callable[[], object], float], None]
) -> None:
    session = _versions(scene)
    before = scene.everything()
    url = scene.engine.url.render_as_string(hide_password=False)
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, url, str(session), str(die_at)], capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    eventually(lambda: scene.everything() == before, 120.0)
    assert scene.build(2, session, base=1).entries == 4


@pytest.mark.parametrize("first", [True, False])
def test_of_two_who_build_a_version_at_once_one_wins_and_the_other_is_told(
    scene: Scene, first: bool
) -> None:
    session = _versions(scene)
    version, base = (2, 1) if not first else (1, None)
    if first:
        scene.execute(sa.delete(models.GoldenKernel))
        scene.execute(sa.delete(models.GoldenEntry))
        scene.execute(sa.delete(models.Golden))
    ready = threading.Barrier(2, timeout=120)
    outcomes: list[Any] = []

    def work() -> None:
        other = Scene(make_engine(scene.engine.url.render_as_string(hide_password=False)))
        ready.wait()
        try:
            outcomes.append(other.build(version, session, base=base).entries)
        except Exception as error:
            outcomes.append(error)
        finally:
            other.engine.dispose()

    slow = _on_write(scene.engine, lambda _, __: time.sleep(0.05))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slow()
    (error,) = [one for one in outcomes if isinstance(one, Exception)]
    assert isinstance(error, GoldenExists), repr(error)
    assert [one for one in outcomes if one is not error] == [4 if base else 2]
    assert len(scene.entries(version)) == (4 if base else 2)


def test_who_comes_while_the_first_version_is_being_built_is_told_so(scene: Scene) -> None:
    session = scene.session({(A, ASM): 1.0})
    began, told = threading.Event(), []

    def other() -> None:
        began.wait(120)
        try:
            Scene(make_engine(scene.engine.url.render_as_string(hide_password=False))).build(
                1, session
            )
        except Exception as error:
            told.append(error)

    def hold(number: int, _: str) -> None:
        if number == 1:
            began.set()
            # on MySQL the other transaction now waits for the unique key, on SQLite for the lock
            time.sleep(0.5)

    thread = threading.Thread(target=other)
    thread.start()
    stop = _on_write(scene.engine, hold)
    assert scene.build(1, session).entries == 1
    stop()
    thread.join()
    assert isinstance(told[0], GoldenExists)


def test_a_promotion_waits_for_an_overwrite_and_judges_what_it_made(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    scene.build(2, base=1)
    slower = scene.session({(A, ASM): 2.0})
    began, reports = threading.Event(), []

    def promoter() -> None:
        began.wait(120)
        reports.append(
            promote(make_engine(scene.engine.url.render_as_string(hide_password=False)), 2)
        )

    def hold(number: int, _: str) -> None:
        if number == 1:
            began.set()
            time.sleep(0.5)

    thread = threading.Thread(target=promoter)
    thread.start()
    stop = _on_write(scene.engine, hold)
    scene.build(2, slower, overwrite=True)
    stop()
    thread.join()
    assert reports[0].total.slower == 1


@pytest.mark.parametrize("column", ["params", "time_ms"])
def test_results_and_kernels_of_different_moments_are_refused(scene: Scene, column: str) -> None:
    if scene.engine.dialect.name == "sqlite":
        return  # SQLite has a single writer
    session = scene.session({(A, ASM): {"time_ms": 1.0, "code": [b"old"]}})
    other = make_engine(scene.engine.url.render_as_string(hide_password=False))

    def drain(_: int, statement: str) -> None:
        if statement.startswith("INSERT INTO golden_kernel"):
            value = "another" if column == "params" else 0.9
            execute(other, sa.update(models.FindDb).values(**{column: value}))

    stop = _on_write(scene.engine, drain, "before_cursor_execute")
    with pytest.raises(SessionChanged):
        scene.build(1, session)
    stop()
    other.dispose()
    assert scene.everything() == [[], [], []]
    assert scene.build(1, session).entries == 1


def _many(scene: Scene) -> int:
    """A session with ROWS results, ten of a layer, each with job, attempt, trial and kernel."""
    session = scene.session({(A, f"Solver{number}"): 1.0 for number in range(10)})
    solver = scene.rows(sa.select(sa.func.min(models.SolverRow.id)))[0][0]
    digits = " CROSS JOIN ".join(
        f"({' UNION ALL '.join(f'SELECT {n} AS d' for n in range(10))}) t{i}" for i in range(5)
    )
    numbers = "SELECT t0.d + 10*t1.d + 100*t2.d + 1000*t3.d + 10000*t4.d AS n FROM " + digits
    key = "printf('%064d', n)" if scene.engine.dialect.name == "sqlite" else "LPAD(n, 64, '0')"
    with scene.builder() as build:
        kernel = build.kernel(b"code")
    for statement in (
        "CREATE TABLE many (n INTEGER PRIMARY KEY)",
        f"INSERT INTO many SELECT n FROM ({numbers}) x WHERE n < {ROWS // 10}",
        f"""INSERT INTO config (id, `key`, kind, driver, label, created_at)
            SELECT 1000 + n, {key}, 'convolution', 'd', 'l', '2026-03-02' FROM many""",
        f"""INSERT INTO job (id, session_id, config_id, solver_id, steps, step, state, reason,
            options, attempt, failures, isolate, updated_at)
            SELECT 1000 + c.n * 10 + s.n, {session}, 1000 + c.n, {solver} + s.n, 'compile,eval',
            'eval', 'evaluated', 'r', '{{}}', 1, 0, 0, '2026-03-02'
            FROM many c CROSS JOIN many s WHERE s.n < 10""",
        """INSERT INTO step_result
            (job_id, step, attempt, ok, output_tail, worker, device, ended_at, busy_s)
            SELECT id, 'eval', 1, 1, '', 'w', 'd', '2026-03-02 10:00:00', 1
            FROM job WHERE id >= 1000""",
        """INSERT INTO trial (job_id, number, output_tail, times_ms, time_ms)
            SELECT id, 0, '', '[]', 1 + id % 97 FROM job WHERE id >= 1000""",
        """INSERT INTO find_db (session_id, config_id, solver_id, job_id, time_ms, workspace_bytes,
            params, algorithm, trial_number, updated_at)
            SELECT session_id, config_id, solver_id, id, 1 + id % 97, 0,
            '256,128,128,32,Default,32,32,2,2,8,8,8,1,1,BlkGemmPipelineScheduler: Intrawave', '',
            0, '2026-03-02' FROM job WHERE id >= 1000""",
        (
            f"INSERT INTO find_db_kernel SELECT id, 0, '{kernel}', 'k.o', '' FROM find_db WHERE"
            " params != ''"
        ),
    ):
        scene.execute(
            sa.text(statement.replace(":", "\\:") if "Intrawave" in statement else statement)
        )
    return session


def test_thousands_of_results_are_built_and_compared_soon(scene: Scene) -> None:
    session = _many(scene)
    for version, base, wishes in ((1, None, {}), (2, 1, {}), (2, 1, {"overwrite": True})):
        started = time.monotonic()
        report = scene.build(version, session, base=base, **wishes)
        seconds = time.monotonic() - started
        assert (report.entries, report.kernels) == (ROWS + 10, ROWS)
        assert seconds < _BUILD_S
    started = time.monotonic()
    report = scene.build(3, base=2)
    assert (report.entries, report.kernels) == (ROWS + 10, ROWS)
    promote(scene.engine, 3, max_regression=0.0)
    assert scene.report_session(session, 3).total.equal == ROWS // 10 + 1
    assert time.monotonic() - started < _BUILD_S

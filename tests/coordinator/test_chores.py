"""The clock of a coordinator: what is due when, and what is overdue."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tuna.common import clocks
from tuna.common.clocks import RateLimit, Throttle
from tuna.coordinator.chores import Chore, Chores


class Clock:
    """Seconds that pass when a test, or a sleep, says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 3))
        self.now += seconds


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stepped = Clock()
    monkeypatch.setattr(clocks, "clock", stepped)
    monkeypatch.setattr("time.sleep", stepped.sleep)
    return stepped


def test_a_throttle_is_due_at_once_and_then_after_its_period(clock: Clock) -> None:
    one = Throttle(2.0)
    assert one.is_due
    with one.running():
        clock.now += 0.5
    clock.now += 1.4
    assert not one.is_due, "1.9 s since it began"
    clock.now += 0.1
    assert one.is_due


def test_what_takes_long_has_its_share_of_the_time(clock: Clock) -> None:
    one = Throttle(2.0, share=0.05)
    with one.running():
        clock.now += 1.0
    clock.now += 18.9
    assert not one.is_due
    clock.now += 0.1
    assert one.is_due, "1 s of 20"


def test_what_fails_is_due_again_at_once(clock: Clock) -> None:
    one = Throttle(2.0)
    with pytest.raises(OSError, match="away"), one.running():
        raise OSError("away")
    assert one.is_due


def test_a_throttle_waits_as_long_as_it_is_told(clock: Clock) -> None:
    one = Throttle(2.0)
    one.wait(5.0)
    clock.now += 4.9
    assert not one.is_due
    clock.now += 0.2
    assert one.late_s == pytest.approx(0.1)


def test_rounds_are_spaced_and_follow_each_other_at_once_after_a_pause(clock: Clock) -> None:
    limit = RateLimit(0.1, burst=3)
    for _ in range(5):
        limit.wait()
    assert clock.slept == [0.0, 0.0, 0.0, 0.1, 0.1]
    clock.now += 60.0
    clock.slept.clear()
    for _ in range(4):
        limit.wait()
    assert clock.slept == [0.0, 0.0, 0.0, 0.1]


def test_chores_run_in_their_order_when_they_are_due(clock: Clock) -> None:
    ran: list[str] = []

    def chore(name: str, every_s: float, moved: int | None) -> Chore:
        return Chore(name, every_s, lambda: ran.append(name) or moved)

    all_ = Chores((chore("rounds", 2.0, 3), chore("reclaim", 1.0, None), chore("sweep", 30.0, 4)))
    assert all_.run_due() == 7
    assert ran == ["rounds", "reclaim", "sweep"]
    clock.now += 1.0
    assert all_.run_due() == 0
    clock.now += 1.0
    assert all_.run_due() == 3
    assert ran[3:] == ["reclaim", "rounds", "reclaim"]


def test_a_chore_that_others_kept_from_running_is_logged_as_overdue(clock: Clock) -> None:
    def slow() -> None:
        clock.now += 45.0

    all_ = Chores((Chore("slow", 90.0, slow), Chore("reclaim", 1.0, lambda: None)))
    with capture_logs() as logs:
        all_.run_due()
        assert logs == [], "the first time nothing is late"
        clock.now += 45.0
        all_.run_due()
    assert [(one["event"], one["chores"], one["late_s"]) for one in logs] == [
        ("chores overdue", "reclaim", 44.0)
    ]


def test_chores_that_an_outage_kept_from_running_are_logged_once_after_it(clock: Clock) -> None:
    """Each attempt logged them anew: one line every two seconds, all night."""
    away = [False]

    def read() -> None:
        if away[0]:
            raise OSError("away")

    all_ = Chores((Chore("read", 1.0, read), Chore("reclaim", 1.0, lambda: None)))
    all_.run_due()
    away[0] = True
    with capture_logs() as logs:
        for _ in range(3):
            clock.now += 60.0
            with pytest.raises(OSError, match="away"):
                all_.run_due()
        assert logs == []
        away[0] = False
        all_.run_due()
    assert [(one["chores"], one["late_s"]) for one in logs] == [("read, reclaim", 179.0)]

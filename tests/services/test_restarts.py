"""Pauses between the restarts of a process."""

from __future__ import annotations

from tuna.common.restarts import Restarts


def test_restarts_wait_longer_each_time_up_to_a_maximum() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(lived_s=1.0) for _ in range(8)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]
    assert not restarts.are_over


def test_restarts_are_over_after_their_number() -> None:
    restarts = Restarts(6)
    over = []
    for _ in range(7):
        restarts.pause_s(lived_s=1.0)
        over.append(restarts.are_over)
    assert over == [False] * 6 + [True]


def test_restarts_begin_anew_after_a_long_uptime() -> None:
    restarts = Restarts(6)
    for _ in range(6):
        restarts.pause_s(lived_s=1.0)
    assert restarts.pause_s(lived_s=3600.0) == 1.0
    assert restarts.ends == 1

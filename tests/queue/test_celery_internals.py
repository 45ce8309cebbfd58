"""What we know of Celery's and kombu's private parts still holds in the versions that are
installed."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
from celery.worker import state

from tuna.queue import celery_internals
from tuna.queue.celery_internals import READ_IN

PINS = (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize("package", READ_IN)
def test_the_versions_are_those_in_which_they_were_read(package: str) -> None:
    assert version(package).rsplit(".", 1)[0] == READ_IN[package], (
        "read tuna/queue/celery_internals.py again"
    )


@pytest.mark.parametrize("package", READ_IN)
def test_no_other_version_is_installed_with_tuna(package: str) -> None:
    major, minor = READ_IN[package].split(".")
    assert re.findall(rf'"{package}(>=[^"]*)"', PINS) == [
        f">={major}.{minor},<{major}.{int(minor) + 1}"
    ]


def test_the_consumer_has_every_step_but_gossip() -> None:
    from celery.worker.consumer.consumer import Consumer

    dropped: list[str] = []
    ours = celery_internals.consumer_class(dropped.append)
    assert issubclass(ours, Consumer)
    left_out = set(Consumer.Blueprint.default_steps) - set(ours.Blueprint.default_steps)
    assert left_out == {"celery.worker.consumer.gossip:Gossip"}
    message = Mock()
    ours.on_decode_error(Mock(), message, ValueError("no gzip"))
    message.ack_log_error.assert_called_once()
    assert dropped == ["ValueError: no gzip"]


def test_a_worker_is_stopped_through_celerys_own_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "should_stop", None)
    celery_internals.stop_warmly()
    assert state.should_stop == 0
    with pytest.raises(SystemExit):
        state.maybe_shutdown()


def test_what_is_reserved_or_active_is_in_hand_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Request:
        def __init__(self, number: int) -> None:
            self.kwargs = {"chunk": str(number)}

    both, waiting = Request(1), Request(2)
    monkeypatch.setattr(state, "reserved_requests", {both, waiting})
    monkeypatch.setattr(state, "active_requests", {both})
    assert sorted(found["chunk"] for found in celery_internals.current_task_arguments()) == [
        "1",
        "2",
    ]

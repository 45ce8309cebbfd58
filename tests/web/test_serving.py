"""The process of the service, as it is typed."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


@contextmanager
def serving(home: Path, *words: str) -> Iterator[str]:
    """`tuna serve` on any port; yields the link that it prints."""
    command = [sys.executable, "-m", "tuna", "serve", "--listen", "127.0.0.1:0", *words]
    process = subprocess.Popen(
        command, env={**os.environ, "TUNA_HOME": str(home)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


@pytest.mark.service
def test_the_link_of_the_owner_works_and_goes_on_after_a_restart(home: Path) -> None:
    with serving(home) as link:
        found = re.fullmatch(r"(http://127\.0\.0\.1:[0-9]+)/login\?token=([\w.-]+)", link)
        assert found is not None
        headers = {"authorization": f"Bearer {found[2]}"}
        answer = httpx.get(f"{found[1]}/v1/whoami", headers=headers)
        assert answer.json()["role"] == "admin"
        assert httpx.get(link).status_code == 303
    kept = home / "run" / "serve.token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().strip() == found[2]
    with serving(home) as link:
        assert link.endswith(found[2])


def test_an_address_that_cannot_be_had_is_refused_before_anything_is_written(
    empty_home: Path, type_in: Callable
) -> None:
    for listen in ("0.0.0.0:80", "nonsense", "127.0.0.1:99999"):
        refused = type_in("tuna", "serve", "--listen", listen)
        assert (refused.code, refused.err.count("Error: ")) == (2, 1)
    assert not (empty_home / "run" / "serve.token").exists()

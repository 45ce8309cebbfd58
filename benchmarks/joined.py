"""Throughput of a joined worker against an own one, on the same servers in the same run."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from benchmarks.harness import Outcome
from tuna.testing.servers import redis_server, with_password

BUDGET_SHARE = 0.6
_TOKEN_S = 600
_URL = "BENCH_REDIS_URL"


def compare(name: str, items: int, rounds: int, seconds: Callable[[str, bool], float]) -> int:
    """Run own and joined workers in turn.

    `seconds(reason, joined)` does `items` and returns the worker's seconds.
    """
    own, joined = [], []
    password = secrets.token_hex(16)
    with redis_server("--requirepass", password, host="127.0.0.1") as url:
        os.environ |= {
            _URL: url,
            "TUNA_BROKER_URL": with_password(url, password),
            "TUNA_REDIS_URL": with_password(url, password),
        }
        for number in range(rounds):
            own.append(items / seconds(f"own {number}", False))
            joined.append(items / seconds(f"joined {number}", True))
    figures = {"joined_per_s": statistics.median(joined), "joined_least_per_s": min(joined)}
    baseline = {"own_per_s": statistics.median(own), "own_most_per_s": max(own)}
    ratios = {"joined_vs_own": figures["joined_per_s"] / baseline["own_per_s"]}
    return Outcome(
        f"{name} through the gate",
        figures,
        baseline,
        ratios,
        budget={"joined_vs_own": BUDGET_SHARE},
    ).print()


@contextlib.contextmanager
def worker(role: str) -> Iterator[None]:
    """A worker that has nothing but its token; it joins once a coordinator runs."""
    from tuna import api

    line = api.create_token(role, _TOKEN_S, os.environ[_URL])  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="tuna-bench-") as home:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TUNA_", "CELERY_"))
        }
        env |= {"TUNA_HOME": home, "TUNA_SIMULATED": "1", "TUNA_JOIN": line}
        process = subprocess.Popen(
            [sys.executable, "-m", "tuna", "worker", role], env=env, stdout=sys.stderr
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()

"""Throughput of a remote worker beside that of an own worker, on the same servers in the same
run."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from benchmarks.harness import Outcome

BUDGET_SHARE = 0.5
_TOKEN_S = 600


def compare(name: str, items: int, rounds: int, seconds: Callable[[str, bool], float]) -> int:
    """Run own and remote workers in turn; `seconds(reason, is_remote)` does `items` and says how
    long the worker took."""
    own, remote = [], []
    for number in range(rounds):
        own.append(items / seconds(f"own {number}", False))
        remote.append(items / seconds(f"remote {number}", True))
    figures = {"remote_per_s": statistics.median(remote), "remote_least_per_s": min(remote)}
    baseline = {"own_per_s": statistics.median(own), "own_most_per_s": max(own)}
    ratios = {"remote_vs_own": figures["remote_per_s"] / baseline["own_per_s"]}
    return Outcome(
        f"{name} through the gateway",
        figures,
        baseline,
        ratios,
        budget={"remote_vs_own": BUDGET_SHARE},
    ).print()


@contextlib.contextmanager
def remote_worker(role: str) -> Iterator[None]:
    """A gateway, and a worker that knows its token and nothing else of this installation."""
    from tuna_remote import joining

    with joining.listening("127.0.0.1", 0) as url, tempfile.TemporaryDirectory() as home:
        line = joining.create_token(role, _TOKEN_S, url)  # type: ignore[arg-type]
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

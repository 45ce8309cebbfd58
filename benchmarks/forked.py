"""Judges cases one after the other in forked processes, so that one that ends its process, or takes
too long, costs no other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Case = TypeVar("_Case")
_Verdict = TypeVar("_Verdict")


def judged(
    judge: Callable[[_Case], _Verdict],
    cases: Sequence[_Case],
    failed: Callable[[str], _Verdict],
    timeout_s: float,
) -> list[_Verdict]:
    """Return the verdict on each case: what `judge` says of it in a forked process, which goes on
    with the next one, or `failed` with the reason where there is no answer."""
    verdicts: list[_Verdict] = []
    while len(verdicts) < len(cases):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        left = cases[len(verdicts) :]
        process = multiprocessing.get_context("fork").Process(
            target=_tell, args=(judge, left, theirs)
        )
        process.start()
        theirs.close()
        try:
            while len(verdicts) < len(cases) and ours.poll(timeout_s):
                verdicts.append(ours.recv())
            if len(verdicts) < len(cases):
                verdicts.append(failed(f"no answer within {timeout_s:.0f} s"))
        except EOFError:
            process.join()
            verdicts.append(failed(f"the process ended with {process.exitcode}"))
        finally:
            process.kill()
            process.join()
            ours.close()
    return verdicts


def _tell(judge: Callable[[Any], Any], cases: Sequence[Any], pipe: Any) -> None:
    for case in cases:
        pipe.send(judge(case))

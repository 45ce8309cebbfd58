"""The compile child of every `CandidateLibrary`: proposes candidates and builds them with the
library's `Builder`."""

from __future__ import annotations

import functools
import json
import pkgutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuna.configs import from_json
from tuna.libraries.kernels import Builder, KernelJob, Known, Past, SearchRound


def propose(builder: str, job: dict[str, Any]) -> dict[str, Any]:
    """The params of each candidate, as text."""
    return {"params": list(_builder(builder).propose(KernelJob.from_json(job)))}


def search(builder: str, job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The params of the candidates of another round.

    `asked` has the fields of `SearchRound`: `history` is a file of one JSON object a line, `known`
    of each search its `Known.label` and `same`, and the `path` of such a file, before whose trials
    a line with the search's `config` may stand; `prior`, a file, may be missing.
    """
    others = []
    for sibling in asked["known"]:
        trials, config = _past(sibling["path"])
        layer = None if config is None else from_json(config)
        others.append(Known(sibling["label"], trials, sibling["same"], layer))
    prior = Path(asked["prior"]).read_bytes() if "prior" in asked else None
    round_ = SearchRound(_past(asked["history"])[0], asked["count"], others, prior)
    return {"params": list(_builder(builder).search(KernelJob.from_json(job), round_))}


def _past(path: str) -> tuple[list[Past], dict[str, Any] | None]:
    """Return the trials, and the config where the first line has one."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    config = rows.pop(0)["config"] if rows and "config" in rows[0] else None
    return [Past(**row) for row in rows], config


def workload(builder: str, job: dict[str, Any], path: str) -> dict[str, Any]:
    """Write the description of the problem to `path`; returns the number of bytes."""
    return {"bytes": Path(path).write_bytes(_builder(builder).workload(KernelJob.from_json(job)))}


def build_keys(builder: str, job: dict[str, Any], params: Sequence[str]) -> dict[str, Any]:
    """The build key of each of these candidates, empty where `Builder.build_key` raised, and the
    last exception of it."""
    made, given, keys, fault = _builder(builder), KernelJob.from_json(job), list[str](), ""
    for one in params:
        try:
            keys.append(made.build_key(given, one))
        except Exception as error:  # the candidate's fault alone; its build may raise it, too
            keys.append("")
            fault = f"{type(error).__name__}: {error}"
    return {"keys": keys, "fault": fault}


def build(
    builder: str, job: dict[str, Any], params: str, path: str, built: str | None = None
) -> dict[str, Any]:
    """Build one candidate into the file `path`, or make it of the file `built` of one with the same
    build key; returns the seconds that took."""
    made, given = _builder(builder), KernelJob.from_json(job)
    started = time.perf_counter()
    if built is None:
        made.build(given, params, Path(path))
    else:
        made.rebuild(given, params, Path(built), Path(path))
    return {"seconds": time.perf_counter() - started}


@functools.cache
def _builder(name: str) -> Builder:
    made: Builder = pkgutil.resolve_name(name)()
    return made


HANDLERS = {
    "propose": propose,
    "search": search,
    "workload": workload,
    "build_keys": build_keys,
    "build": build,
}

"""CPU time of builds that share code through the artifact store, beside builds that do not.

The same tiles of the fused experts of `benchmarks.triton_builds` are compiled for one architecture
at 18 batch sizes, by processes with a library and a store as compile workers have them. The
artifacts must be the same bytes in both. No GPU is needed.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Outcome, command_line
from benchmarks.triton_builds import layer
from tuna.artifacts.files import folder_url
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.libraries.items import Candidate, WorkItem
from tuna.testing.rehearsal import run_context
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.library import TritonLibrary
from tuna_triton.tiles import TARGETS, tile_text
from tuna_triton.tuned_files import GRID

SOLVER = "TritonMoe"


class Counting(Artifacts):
    """A store that counts the builds that were recorded in this process."""

    builds = 0

    def record_build(self, key: str, digest: str) -> None:
        self.builds += 1
        super().record_build(key, digest)


class SharesNothing(Counting):
    """A store in which no build is found."""

    def find_build(self, key: str) -> None:
        return None


def items(arch: str, tiles: int) -> Sequence[WorkItem]:
    """Return a compile step for each batch size, of the same tiles as far as they differ there."""
    description, target = DESCRIPTIONS[SOLVER], TARGETS[arch]
    space = description.space(layer(GRID[-1]), target).tiles
    chosen = random.Random(1).sample(list(space), tiles)  # noqa: S311
    found = []
    for tokens in GRID:
        config = layer(tokens)
        texts = [tile_text(description.family.canonical(config, tile, "")) for tile in chosen]
        candidates = [
            Candidate(index=index, params=text) for index, text in enumerate(dict.fromkeys(texts))
        ]
        facts = {"job_id": tokens, "attempt": 1, "session_id": 1, "library": "triton"}
        facts |= {"step": "compile", "solver": SOLVER, "seed": tokens, "target": arch}
        options = {"candidates": tiles, "build_timeout_s": 600}
        found.append(
            WorkItem(config=config.to_json(), candidates=candidates, options=options, **facts)
        )
    return found


def compiled(folder: Path, work: Sequence[WorkItem], share: bool) -> tuple[list[str], int]:
    """Return the digests of a worker's artifacts, or the causes of failures, and how many
    candidates it built."""
    library, store = TritonLibrary(), Counting if share else SharesNothing
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = store(folder_url(folder), Path(scratch), Keys.of_secret("6b" * 32))
        context = replace(run_context(Path(scratch)), artifacts=artifacts, device=None)
        results = list(library.run(library.steps[0], work, context))
        library.close()
    made = [one.artifact or str(one.cause) for result in results for one in result.trials]
    return made, artifacts.builds


def main() -> int:
    """Compile with and without a shared store."""
    parser = command_line(__doc__, tiles=24, processes=2)
    parser.add_argument("--arch", choices=sorted(TARGETS), default="sm_90")
    asked = parser.parse_args()
    work = items(asked.arch, asked.tiles)
    dealt = [work[number :: asked.processes] for number in range(asked.processes)]
    seconds, made, builds = {}, {}, {}
    for name, share in (("alone", False), ("shared", True)):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            with ProcessPoolExecutor(asked.processes) as pool:
                work_of = partial(compiled, Path(folder), share=share)
                parts = list(pool.map(work_of, dealt))
            made[name] = [one for part, _ in parts for one in part]
            builds[name] = sum(number for _, number in parts)
            keys = len(list(Path(folder).rglob("*.build")))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        wall_s = time.monotonic() - began
        seconds[name] = {"cpu_s": cpu_s, "wall_s": wall_s, "built": builds[name]}
        print(f"{name}: {seconds[name]}", file=sys.stderr)
    figures = {
        "candidates": len(made["shared"]),
        "different_keys": keys,
        "failed": sum(len(one) != 64 for one in made["shared"]),
        "other_artifacts": sum(a != b for a, b in zip(made["alone"], made["shared"], strict=True)),
        "processes": asked.processes,
        **seconds["shared"],
    }
    return Outcome(
        "shared_builds",
        figures,
        baseline=seconds["alone"],
        ratios={"cpu_saved": 1 - seconds["shared"]["cpu_s"] / seconds["alone"]["cpu_s"]},
        limits={"other_artifacts": 0.0, "failed": 0.0},
    ).print()


if __name__ == "__main__":
    sys.exit(main())

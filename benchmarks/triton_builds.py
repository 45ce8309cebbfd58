"""Builds of the fused experts that vLLM #44830 tuned for 77 minutes: E=512, N=128, fp8 in blocks of
128 x 128, at 18 batch sizes.

The space of each batch size is counted; every different build is made once, by as many processes as
there are cores, and with `--repeat` a second time, to the same bytes. A build fails here unless its
parameters are those of its PTX or of its AMD metadata. No GPU is needed; nothing is launched.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import sys
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor

from benchmarks.harness import Outcome, command_line
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import TARGETS, least_shared_bytes, tile_of, tile_text
from tuna_triton.tuned_files import GRID

#: Name of a build: the batch size, the tile and the number of its launch.
Build = tuple[int, str, int]
#: SHA-256 of its code, bytes of its shared memory, and those that were expected at least.
Built = tuple[str, int, int]


def layer(tokens: int) -> MoeConfig:
    """Return the layer of Qwen3-Next with four ranks, at one batch size."""
    return MoeConfig(tokens, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)


def build(solver: str, arch: str, one: Build, until: float) -> Built | None:
    """Return what became of a build, made in a child; None after the time `until`."""
    if time.time() > until:
        return None
    from tuna_triton import builder

    tokens, text, number = one
    description, target, tile = DESCRIPTIONS[solver], TARGETS[arch], tile_of(text)
    kernel = description.kernel()
    assert kernel is not None
    plan = description.family.plan(layer(tokens), tile, target, description.package)
    source = builder.specialise(kernel, plan, plan.calls[number], target)
    made = builder.compiled.__wrapped__(source)  # without its cache
    least = least_shared_bytes(plan, tile, target)
    return hashlib.sha256(made.code).hexdigest(), made.shared_bytes, least


def distinct(solver: str, arch: str) -> tuple[list[Build], Counter[str]]:
    """Return one of each group of equal builds, and counts over all batch sizes."""
    from tuna_triton import builder

    description, target, counts = DESCRIPTIONS[solver], TARGETS[arch], Counter[str]()
    kernel = description.kernel()
    assert kernel is not None
    builds: dict[object, Build] = {}
    for tokens in GRID:
        space = description.space(layer(tokens), target)
        counts["points"] += space.size
        counts["same"] += space.same
        counts["refused_for_shared_memory"] += space.too_large
        counts["candidates"] += len(space.tiles)
        for tile in space.tiles:
            plan = description.family.plan(layer(tokens), tile, target, description.package)
            for number, call in enumerate(plan.calls):
                source = builder.specialise(kernel, plan, call, target)
                builds.setdefault(source, (tokens, tile_text(tile), number))
    return list(builds.values()), counts


def main() -> int:
    """Run it; options say what for."""
    parser = command_line(__doc__)
    parser.add_argument("--arch", choices=sorted(TARGETS), default="sm_90")
    parser.add_argument(
        "--solver", choices=["TritonMoe", "VllmMoe", "SglangMoe"], default="TritonMoe"
    )
    parser.add_argument("--sample", type=int, help="build so many, drawn at random; default: all")
    parser.add_argument("--repeat", action="store_true", help="build each twice, and compare")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no build after so many")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    builds, counts = distinct(asked.solver, asked.arch)
    print(f"{len(builds)} different builds; {dict(counts)}", file=sys.stderr)
    most = len(builds) if asked.sample is None else min(asked.sample, len(builds))
    chosen = random.Random(1).sample(builds, most)  # noqa: S311
    until = time.time() + 60 * asked.minutes
    began, rounds, answers = time.monotonic(), 2 if asked.repeat else 1, []
    for _ in range(rounds):
        # processes of their own in each round, so that nothing is remembered
        with ProcessPoolExecutor(asked.processes) as pool:
            waiting = [pool.submit(build, asked.solver, asked.arch, one, until) for one in chosen]
            answers.append([_answer(one) for one in waiting])
        print(f"{len(chosen)} builds after {time.monotonic() - began:.0f} s", file=sys.stderr)
    seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    good = [one for one in answers[0] if isinstance(one, tuple)]
    faults = Counter(one for one in answers[0] if isinstance(one, str))
    print(f"faults: {dict(faults)}", file=sys.stderr)
    limit = TARGETS[asked.arch].shared_bytes
    figures = {
        **counts,
        "different_builds": len(builds),
        "built": len(good),
        "different_code": len({digest for digest, _, _ in good}),
        "too_large_after_all": sum(shared > limit for _, shared, _ in good),
        "wall_s": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
        "processes": asked.processes,
        "rounds": rounds,
    }
    checks = {
        "faults": sum(faults.values()),  # a parameter list that is not that of the code among them
        "other_code_in_the_second_round": sum(
            a != b for a, b in zip(answers[0], answers[-1], strict=True) if a and b
        ),
        "less_shared_memory_than_expected": sum(shared < least for _, shared, least in good),
    }
    ratios = {"same_kernels": counts["same"] / counts["points"]}
    limits, budget = dict.fromkeys(checks, 0.0), {"same_kernels": 0.45}
    outcome = Outcome(
        "triton_builds",
        figures | checks,
        ratios=ratios,
        budget=budget,
        limits=limits,
    )
    return outcome.print()


def _answer(one: Future[Built | None]) -> Built | str | None:
    try:
        return one.result()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


if __name__ == "__main__":
    sys.exit(main())

"""Fixed kernels on a measuring core, with and without builds on the other cores, in pairs.

Where the median difference of a kernel's CPU or wall time is above 3 %, the machine is noisy, as
`tuna doctor --noise` finds too, and the pairs are repeated with the setting that follows, under
which builds stop while the machine measures. The verdict is about what holds then: at most 3 % for
every kernel and clock. Needs two cores or more, and a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Outcome, command_line
from tuna.libraries.noise_records import MAX_NOISE, last, quiet_needed, store
from tuna.settings import get_settings
from tuna_noise import noise


def main() -> int:
    """Command line; `--pairs`: how often."""
    options = command_line(__doc__, pairs=30).parse_args()
    with tempfile.TemporaryDirectory() as home:  # the finding of a benchmark is nobody's setting
        settings = get_settings().model_copy(update={"home": Path(home), "quiet": "auto"})
        without = list(noise.pairs(settings, options.pairs))
        found = noise.record(settings, without)
        store(found, settings)
        quiet = quiet_needed(settings)
        assert last(settings) == found
        print(
            f"quiet {'needed' if quiet.needed else 'not needed'}: {quiet.reason}", file=sys.stderr
        )
        final = list(noise.pairs(settings, options.pairs, quiet=True)) if quiet.needed else without
    outcome = Outcome("noise", {"noisy": float(found.noisy), "pairs": float(options.pairs)})
    outcome.figures["cores busy with builds, beside"] = _median(
        [pair.busy_beside for pair in without]
    )
    outcome.figures["cores busy with builds, without"] = _median(
        [pair.busy_alone for pair in without]
    )
    outcome.baseline |= _named(found.differences, "change, builds go on")
    verdict = _named(noise.differences(final), "change, by the setting")
    outcome.ratios |= verdict
    outcome.ratios["largest change"] = max(verdict.values())
    outcome.limits["largest change"] = MAX_NOISE
    # a load that does not use the cores disturbs nothing
    outcome.budget["cores busy with builds, beside"] = 0.5 * found.builds
    return outcome.print()


def _named(differences: Mapping[str, Mapping[str, float]], what: str) -> dict[str, float]:
    return {
        f"{kernel} {clock} {what}": value
        for kernel, clocks in differences.items()
        for clock, value in clocks.items()
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    raise SystemExit(main())

"""Latency of tuned models against PyTorch, onnxruntime and untuned TVM, and its shares.

Each model of examples/make_models.py is imported, tuned for `--minutes`, built, and timed in turn
with what is installed, on one core in CPU time, or on `--cores` of them by the clock; the two
ResNets once more with direct sums only. Everything lies in a new folder, so that nothing is known
when the first model comes. A table goes to stderr. Also: a second build, and a batch of eight that
was never tuned; with `--batch-minutes` it is tuned afterwards with 32 candidates, and its tasks are
compared with what they took before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Outcome, command_line
from tuna.sandbox.cores import measuring_with

if TYPE_CHECKING:
    from tuna_models.api import BuiltModel

_MAKE = Path(__file__).resolve().parents[1] / "examples" / "make_models.py"
#: Limits of the time relative to the better of PyTorch and onnxruntime, by model.
_LIMITS = {"resnet18": 0.55, "resnet50": 0.80, "mobilenetv2": 1.0}
#: The same with direct sums only, for models that gain by Winograd.
_DIRECT_LIMIT, _DIRECT = 0.95, ("resnet18", "resnet50")
_SLOWER_UNTUNED, _OF_TASKS, _SECOND_BUILD_S, _LOOKUP_S, _BATCH_BUILD_S = 10.0, 1.15, 2.0, 0.05, 60.0
#: Limit of untuned over tuned time, a geometric mean over tasks, and candidates of the tuning.
_NEVER_TUNED, _BATCH_CANDIDATES = 1.5, 32
_CONVERSIONS = ("task from_blocks", "task to_blocks")


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=_LIMITS, default=list(_LIMITS))
    parser.add_argument("--minutes", type=float, default=3.0, help="of tuning, for each model")
    parser.add_argument(
        "--direct-minutes", type=float, default=1.0, help="of tuning direct sums; 0: leave them out"
    )
    parser.add_argument("--size", type=int, default=224, help="rows and columns of an image")
    parser.add_argument(
        "--batch", type=int, default=8, help="of the first model, never tuned; 0: leave it out"
    )
    parser.add_argument(
        "--batch-minutes",
        type=float,
        default=0.0,
        help="of tuning that batch afterwards, to compare; 0: leave it out",
    )
    parser.add_argument(
        "--only-batch", action="store_true", help="that batch alone, of which nothing is known then"
    )
    parser.add_argument(
        "--no-untuned", action="store_true", help="leave untuned TVM out, which takes seconds a run"
    )
    parser.add_argument(
        "--cores", type=int, default=1, help="threads of all that takes part; several by wall time"
    )
    parser.add_argument(
        "--folder", type=Path, help="for models, results and libraries; default: a temporary one"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tuna-model-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TUNA_HOME"] = str(folder / "home")
        with measuring_with(options.cores):
            return _Run(options, folder).all().print()


class _Run:
    """The models, one after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._outcome = Outcome("model", {})

    def all(self) -> Outcome:
        for name in self._options.models if not self._options.only_batch else ():
            self._model(name)
        if self._options.batch:
            self._never_tuned(self._options.models[0], self._options.batch)
        return self._outcome

    def _model(self, name: str) -> None:
        from tuna_models import api

        path, figures = self._made(name, 1), self._outcome.figures
        started = time.perf_counter()
        imported = api.import_model(name, path)
        figures[f"{name} import s"] = time.perf_counter() - started
        self._tune(name, winograd=True)
        checks = api.Checks(untuned=not self._options.no_untuned)
        started = time.perf_counter()
        built = api.build_model(name, self._folder / f"{name}.so", checks=checks)
        figures[f"{name} build s"] = time.perf_counter() - started
        self._write_down(name, built, _LIMITS[name])
        started = time.perf_counter()
        again = api.build_model(name, self._folder / f"{name}.so", checks=checks)
        assert again.cached
        self._limit(f"{name} second build s", time.perf_counter() - started, _SECOND_BUILD_S)
        self._limit(f"{name} look-up s", again.lookup_s, _LOOKUP_S)
        _say(
            f"{name}: {len(imported.model.manifest.tasks)} tasks; the second build took what the"
            " first had made"
        )
        if name in _DIRECT and self._options.direct_minutes:
            self._tune(name, winograd=False)
            direct = api.build_model(name, self._folder / f"{name}-direct.so", winograd=False)
            self._write_down(f"{name} direct sums only", direct, _DIRECT_LIMIT)

    def _made(self, name: str, batch: int) -> Path:
        path = self._folder / f"{name}-{batch}.onnx"
        words = [sys.executable, str(_MAKE), name, "-o", str(path)]
        words += ["--size", str(self._options.size), "--batch", str(batch)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return path

    def _tune(self, name: str, *, winograd: bool) -> None:
        from tuna_models import api

        minutes = self._options.minutes if winograd else self._options.direct_minutes
        started = time.perf_counter()
        tuned = api.tune_model(name, minutes=minutes, winograd=winograd)
        key = name if winograd else f"{name} direct sums only"
        _say(
            f"{key}: {tuned.tasks} tasks can be tuned, {tuned.known} had a result before; "
            f"{tuned.added} of {tuned.wanted} missing jobs in {time.perf_counter() - started:.0f} s"
        )
        figures = {"tasks": tuned.tasks, "known before": tuned.known, "jobs": tuned.added}
        self._outcome.figures |= {f"{key} {what}": float(count) for what, count in figures.items()}

    def _write_down(self, key: str, built: BuiltModel, limit: float) -> None:
        """Latency and ratios, and where the time goes."""
        figures, ratios = self._outcome.figures, self._outcome.ratios
        medians = {name: statistics.median(times) for name, times in built.times_ms.items()}
        ours = medians.pop("tuna")
        figures[f"{key} ms"] = ours
        figures[f"{key} wall ms"] = statistics.median(built.wall_ms.get("tuna", [ours]))
        figures[f"{key} largest error"] = max(built.errors.values())
        _say(
            f"{key}: {ours:.2f} ms ({_spread(built, 'tuna')}), largest error"
            f" {max(built.errors.values()):.0e}"
        )
        for name, ms in medians.items():
            self._outcome.baseline[f"{key} {name} ms"] = ms
            _say(f"{key}: {ours / ms:.2f} of {name}'s {ms:.2f} ms ({_spread(built, name)})")
        for name, reason in built.absent.items():
            _say(f"{key}: {name} does not take part: {reason}")
        if medians:
            ratios[f"{key} against the better runtime"] = ours / min(medians.values())
            self._outcome.limits[f"{key} against the better runtime"] = limit
        if built.untuned_ms is not None:
            untuned, in_turn = built.untuned_ms
            ratios[f"{key} untuned TVM against it"] = untuned / in_turn
            self._outcome.budget[f"{key} untuned TVM against it"] = _SLOWER_UNTUNED
            _say(
                f"{key}: untuned TVM takes {untuned / in_turn:.0f} times as long, {untuned:.0f} ms"
            )
        self._where_the_time_goes(key, built, ours)

    def _where_the_time_goes(self, key: str, built: BuiltModel, ours: float) -> None:
        cores = {
            entry.task.label for entry in built.model.manifest.tasks if entry.task.core is not None
        }
        spent = built.functions_ms
        conversions = sum(ms for label, ms in spent.items() if label.startswith(_CONVERSIONS))
        in_cores = sum(ms for label, ms in spent.items() if label in cores)
        others = sum(spent.values()) - in_cores - conversions
        runtime = built.runtime_share / (1 - built.runtime_share) * sum(spent.values())
        tuned, tuned_inside = (
            sum(built.tuned_ms.values()),
            sum(spent.get(label, 0.0) for label in built.tuned_ms),
        )
        figures = {
            "tasks at their tuned time ms": tuned,
            "the same inside the model ms": tuned_inside,
        }
        figures |= {
            "conversions ms": conversions,
            "other functions ms": others,
            "runtime ms": runtime,
        }
        self._outcome.figures |= {f"{key} {what}": ms for what, ms in figures.items()}
        exact = tuned_inside / in_cores if in_cores else 0.0
        self._outcome.figures[f"{key} exact share of convolutions and products"] = exact
        self._outcome.budget[f"{key} exact share of convolutions and products"] = 1.0
        if exact == 1.0:
            self._outcome.ratios[f"{key} latency against its tasks"] = ours / tuned
            self._outcome.limits[f"{key} latency against its tasks"] = _OF_TASKS
        shares = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in built.shares.items())
        _say(
            f"{key}: of the time {shares}, runtime {100 * built.runtime_share:.1f} %; kernels"
            f" compared: {built.compared}"
        )
        _say(f"{key}: " + ", ".join(f"{what} {ms:.2f}" for what, ms in figures.items()))
        for label, ms in list(spent.items())[:5]:
            _say(
                f"{key}:   {ms:.2f} ms {label}"
                + (f", tuned {built.tuned_ms[label]:.2f}" if label in built.tuned_ms else "")
            )

    def _never_tuned(self, name: str, batch: int) -> None:
        """Only what is known of other batches, and estimates."""
        from tuna_models import api

        key = f"{name} batch {batch}"
        api.import_model(f"{name}-{batch}", self._made(name, batch))
        started = time.perf_counter()
        built = api.build_model(
            f"{name}-{batch}", self._folder / f"{name}-{batch}.so", checks=api.Checks(rivals=False)
        )
        self._limit(f"{key} build s", time.perf_counter() - started, _BATCH_BUILD_S)
        self._outcome.figures[f"{key} ms"] = statistics.median(built.times_ms["tuna"])
        classes = ", ".join(f"{count} {kind}" for kind, count in built.tasks.items())
        _say(
            f"{key}, never tuned: {classes}; built in"
            f" {self._outcome.figures[f'{key} build s']:.0f} s"
        )
        if self._options.batch_minutes:
            self._tuned_afterwards(f"{name}-{batch}", key, built)

    def _tuned_afterwards(self, name: str, key: str, before: BuiltModel) -> None:
        """Compare times of convolutions and products before tuning with the best candidates'."""
        from tuna_models import api

        api.tune_model(name, candidates=_BATCH_CANDIDATES, minutes=self._options.batch_minutes)
        after = api.build_model(
            name, self._folder / f"{name}-tuned.so", checks=api.Checks(rivals=False)
        )
        cores = {
            entry.task.label for entry in after.model.manifest.tasks if entry.task.core is not None
        }
        times = {
            label: (before.functions_ms[label], after.functions_ms[label])
            for label in cores & set(after.tuned_ms)
        }
        self._outcome.figures[f"{key} tasks tuned to compare"] = float(len(times))
        self._outcome.budget[f"{key} tasks tuned to compare"] = float(len(cores))
        for label, (untuned_ms, tuned_ms) in sorted(times.items(), key=lambda entry: -entry[1][0]):
            _say(
                f"{key}:   {untuned_ms / tuned_ms:.2f} = {untuned_ms:.2f} / {tuned_ms:.2f} ms"
                f" {label}"
            )
        if times:
            ratio = statistics.geometric_mean(
                untuned_ms / tuned_ms for untuned_ms, tuned_ms in times.values()
            )
            self._outcome.ratios[f"{key} never tuned against tuned"] = ratio
            self._outcome.limits[f"{key} never tuned against tuned"] = _NEVER_TUNED
            _say(
                f"{key}: {len(times)} of {len(cores)} tasks tuned; never tuned they take"
                f" {ratio:.2f} times as long"
            )

    def _limit(self, key: str, value: float, limit: float) -> None:
        self._outcome.figures[key], self._outcome.limits[key] = value, limit


def _spread(built: BuiltModel, name: str) -> str:
    times, wall_ms = built.times_ms[name], built.wall_ms.get(name, built.times_ms[name])
    return f"{min(times):.2f} to {max(times):.2f}, wall {statistics.median(wall_ms):.2f}"


def _say(text: str) -> None:
    print(f"[load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

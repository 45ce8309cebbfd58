"""Everything about an NVIDIA GPU that needs one, in stages of nine minutes at most; on a machine
without one a stand-in of its driver and smaller layers (figure `stand_in`: 1), which says nothing
about speed.

    scripts/bench gpu --run 1 --out FOLDER  # seven minutes: smoke, faults, product, helion
    scripts/bench gpu --run 2 --out FOLDER  # seven minutes: experts at one batch size, exhaustive
                                            # and searched, beside triton.autotune

Both leave `run-1.json`, `run-2.json` and `trials.jsonl` in the folder (benchmarks/gpu_run.py); what
does not fit is left out by name. The stages alone:

    scripts/bench gpu --stage smoke     # launches beside Triton's own, in the box and out of it
    scripts/bench gpu --stage shape     # E=512, N=128, fp8, 18 batch sizes, in four parts or by
                                        # --part: exhaustive, search, again (search), versus
    scripts/bench gpu --stage cold      # Mixtral, two ranks, bf16, one token: all 1,920 candidates
    scripts/bench gpu --stage faults    # planted faults: each named, the next candidate fine
    scripts/bench gpu --stage product   # a product in bf16, searched; then
    scripts/bench gpu --stage helion    # ... beside Helion's full effort, in the same --home
    scripts/bench gpu --stage autotune  # triton.autotune beside `shape`, in the same --home

`versus` times the consumer's default and what `tuna export` writes in turn, through Triton's own
JIT. Parts leave what later ones need in the folder `--home`. `--out FILE` adds the figures as a
line, and `--trials FILE` every trial: `benchmarks/gpu_corpus.py` makes a corpus of that. A machine
without a network, and without most of what Tuna needs, is prepared by

    scripts/gpu-wheels download FOLDER  # where there is a network: wheels for Python 3.12
    scripts/gpu-wheels install FOLDER   # there: makes .venv beside the machine's own packages
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_rivals, gpu_run, gpu_smoke
from benchmarks.gpu_faults import PRODUCT, faults
from benchmarks.gpu_tuning import Run, add_lines, add_trials, agreeing, behind
from benchmarks.harness import Outcome, command_line
from benchmarks.triton_builds import layer as wide_layer
from tuna.configs import Config, DataType, GemmConfig
from tuna_triton.exporters import GAIN
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import AXES, tile_of, tile_text
from tuna_triton.tuned_files import GRID, read_tiles

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("smoke", "shape", "cold", "faults", "product", "autotune", "helion")
PARTS = ("exhaustive", "search", "again", "versus")
#: Seconds for a whole call, for each part of `shape` as the issue allows it, and for `cold`.
CALL_S = 540.0
LIMITS_S = {"exhaustive": 360.0, "search": 90.0, "again": 90.0, "versus": 240.0, "cold": 180.0}
#: Part of the seconds of `smoke` in which launches begin; then comes a product.
_LAUNCHES = 0.7
#: Limits that say nothing where there is no device.
OF_SPEED = (
    *("seconds", "idle_share", "exhaustive_share", "search_share", "tuna_share", "winner_share"),
)
MAX_IDLE, MAX_BEHIND = 0.15, 0.01
#: The product that is tuned beside Helion.
WIDE_PRODUCT = GemmConfig(4096, 4096, 4096, data_type=DataType.BF16)
#: Variable: whether the driver is the stand-in's, 0 or 1; without it nobody has looked yet.
_STAND_IN = "GPU_BENCH_STAND_IN"


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__doc__, candidates=0)
    parser.add_argument("--stage", choices=STAGES, default="smoke")
    parser.add_argument("--part", choices=PARTS, help="of `shape`; default: all of them")
    parser.add_argument("--tokens", help="batch sizes of `shape`; default: the consumers' 18")
    parser.add_argument("--home", type=Path, help="folder with what earlier parts left")
    parser.add_argument(
        "--out", type=Path, help="file to which the figures are added; of --run its folder"
    )
    parser.add_argument("--run", type=int, choices=sorted(gpu_run.RUNS), help="all stages of a run")
    parser.add_argument("--seconds", type=float, help="of the call, at most")
    parser.add_argument("--trials", type=Path, help="file to which every trial is added")
    asked = parser.parse_args(argv)
    stand_in = _stand_in(sys.argv[1:] if argv is None else argv, asked.home)
    if asked.run:
        return gpu_run.whole(asked, stand_in)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if asked.home is None else asked.home.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        stage = Stage(folder, stand_in, asked.trials, asked.out, asked.candidates)
        stage.call_s = asked.seconds or CALL_S
        if asked.stage == "smoke":
            outcomes = [stage.smoke()]
        elif asked.stage == "faults":
            with tempfile.TemporaryDirectory() as scratch:
                outcomes = [stage.told("faults", faults(Path(scratch), stand_in))]
        elif asked.stage in ("cold", "product", "helion"):
            outcomes = [getattr(stage, asked.stage)()]
        elif asked.stage == "autotune":
            outcomes = [stage.autotune(asked.tokens)]
        else:
            outcomes = stage.shape(asked.tokens, [asked.part] if asked.part else PARTS)
    return max(outcome.print() for outcome in outcomes)


@dataclasses.dataclass
class Stage:
    """Runs the stages, and writes what they find."""

    folder: Path
    stand_in: bool
    trials: Path | None
    out: Path | None
    candidates: int
    call_s: float = CALL_S
    started: float = dataclasses.field(default_factory=time.monotonic)

    def told(self, name: str, outcome: Outcome, **more: Any) -> Outcome:
        """The outcome, marked and added to the file."""
        outcome.figures["stand_in"] = float(self.stand_in)
        if self.stand_in:
            outcome.limits = {
                name: most for name, most in outcome.limits.items() if name not in OF_SPEED
            }
        if self.out:
            line = {"stage": name, "figures": outcome.figures, "budget": outcome.budget}
            add_lines(self.out, [{**line, "limits": outcome.limits, **more}])
        return outcome

    def smoke(self) -> Outcome:
        """Launches in three ways, then one product from import to SQL."""
        with tempfile.TemporaryDirectory() as scratch:
            found = gpu_smoke.launches(Path(scratch), self.started + _LAUNCHES * self.call_s)
        print("\n".join(found.notes), file=sys.stderr, flush=True)
        figures = found.figures
        with tempfile.TemporaryDirectory() as scratch:
            run = Run("smoke", Path(scratch))
            run.tune([PRODUCT], ["--candidates", str(self.candidates or 8)], self._until())
            self._keep(run)
        figures |= {f"pipeline_{name}": value for name, value in run.figures.items()}
        count = figures["candidates"]
        budget = dict.fromkeys(("right", "triton_equal", "box_equal"), max(count, 1.0))
        outcome = Outcome(
            *("gpu", figures),
            budget={**budget, "pipeline_layers": 1.0},
            limits={"pipeline_failed": 0.0},
        )
        return self.told("smoke", outcome, notes=found.notes, left_out=found.left_out)

    def cold(self) -> Outcome:
        """All candidates of a layer, with nothing built before."""
        layer = MoeConfig(1, 8, 7168, 4096, 2)
        if self.stand_in:
            layer = dataclasses.replace(layer, intermediate=224, hidden=128)
        with tempfile.TemporaryDirectory() as scratch:
            run = Run("cold", Path(scratch))
            run.tune([layer], self._options(exhaustive=True), self._until())
            self._keep(run)
        outcome = Outcome(
            "gpu",
            run.figures,
            budget={"layers": 1.0},
            limits={"seconds": LIMITS_S["cold"], "wrong": 0.0},
        )
        return self.told("cold", outcome)

    def product(self) -> Outcome:
        """A search for a product in bf16, which `helion` compares with."""
        run = self._tuned("product", [self._product()], self._options(exhaustive=False))
        limits = {"wrong": 0.0}
        return self.told(
            "product", Outcome("gpu", run.figures, budget={"layers": 1}, limits=limits)
        )

    def helion(self) -> Outcome:
        """Helion's full effort on the product of `product`."""
        run, folder = self._run("product"), self.folder / "helion"
        folder.mkdir(exist_ok=True)
        return self._beside(
            "helion", gpu_rivals.helion(self._product(), run, self._left_s(), folder)
        )

    def _product(self) -> GemmConfig:
        small = dataclasses.replace(PRODUCT, data_type=DataType.BF16)
        return small if self.stand_in else WIDE_PRODUCT

    def autotune(self, tokens: str | None) -> Outcome:
        """`triton.autotune` on the tiles of one batch size, beside those parts of `shape` that are
        in the folder."""
        (layer, *_) = self._layers(tokens or str(GRID[-1]))
        runs = {name: self._run(name) for name in ("exhaustive", "search")}
        return self._beside(
            "autotune", gpu_rivals.autotuned(layer, runs, self._left_s(), self.candidates)
        )

    def _beside(self, name: str, found: gpu_rivals.Rivalry) -> Outcome:
        if self.trials:
            head = {"run": name, "stand_in": self.stand_in, "figures": found.outcome.figures}
            add_lines(self.trials, [{**head, "environment": {}, "results": []}, *found.trials])
        return self.told(name, found.outcome, left_out=found.left_out, **found.more)

    def _layers(self, tokens: str | None) -> list[MoeConfig]:
        sizes = [int(one) for one in tokens.split(",")] if tokens else list(GRID)
        layers = [wide_layer(one) for one in sizes]
        if not self.stand_in:
            return layers
        few = layers if tokens else [wide_layer(1), wide_layer(64)]
        return [dataclasses.replace(one, experts=8, topk=2, hidden=256) for one in few]

    def shape(self, tokens: str | None, parts: Sequence[str]) -> list[Outcome]:
        """The parts in order; the last ones are left out where a call's time ends."""
        layers, found = self._layers(tokens), list[Outcome]()
        for part in parts:
            if found and not self.stand_in and self._left_s() < 1.1 * LIMITS_S[part]:
                print(f"no time is left for {part}: call it with --part", file=sys.stderr)
                break
            work: Callable[[Sequence[MoeConfig]], Outcome] = getattr(self, f"_{part}")
            found.append(work(layers))
        return found

    def _exhaustive(self, layers: Sequence[MoeConfig]) -> Outcome:
        run = self._tuned("exhaustive", layers, self._options(exhaustive=True))
        return self._of_part(run, layers, {}, {"idle_share": MAX_IDLE})

    def _search(self, layers: Sequence[MoeConfig]) -> Outcome:
        run = self._tuned("search", layers, self._options(exhaustive=False))
        every, limits = self._run("exhaustive"), {"idle_share": MAX_IDLE}
        if every.is_done:
            run.figures |= behind(run, every)
            limits |= {"behind": MAX_BEHIND}
        return self._of_part(run, layers, {}, limits)

    def _again(self, layers: Sequence[MoeConfig]) -> Outcome:
        before, every = self._run("search"), self._run("exhaustive")
        if not before.is_done:
            raise SystemExit("--part again needs --part search before it, in the same --home.")
        run = self._tuned("again", layers, self._options(exhaustive=False))
        run.figures |= agreeing(run, before, every.times() if every.is_done else before.times())
        return self._of_part(run, layers, {"same_or_close": len(layers) - 1.0}, {})

    def _versus(self, layers: Sequence[MoeConfig]) -> Outcome:
        """The export of the best session beside the consumer's default."""
        run = next((one for name in PARTS if (one := self._run(name)).is_done), None)
        if run is None:
            raise SystemExit("--part versus needs a part that tuned before it, in the same --home.")
        started = time.monotonic()
        answers = self._compared(run, self._pairs(run, layers))
        failed = [one for one in answers if "failed" in one]
        timed = [one for one in answers if "ratio" in one]
        ratios = [one["ratio"] for one in answers if "ratio" in one]
        figures = {
            "seconds": time.monotonic() - started,
            "layers": float(len(answers)),
            "tuned_keys": float(len(timed)),
            "failed": float(len(failed)),
            "by_torch": float(any(one.get("events") == "torch" for one in timed)),
            # certainly slower: the whole interval
            "slower": float(sum(one["high"] < 1 for one in timed)),
            "gain": statistics.geometric_mean(ratios + [1.0] * (len(answers) - len(ratios))),
            "least_gain": min(ratios, default=1.0),
            "largest_gain": max(ratios, default=1.0),
        }
        outcome = Outcome(
            *("gpu", figures),
            budget={"layers": float(len(layers))},
            limits={"slower": 0.0, "failed": 0.0},
        )
        return self.told("versus", outcome, pairs=answers)

    def _pairs(self, run: Run, layers: Sequence[MoeConfig]) -> list[dict[str, Any]]:
        """For each layer the default, and what is exported for it."""
        shutil.rmtree(run.home / "out", ignore_errors=True)
        results = run.results()
        of_vllm = any(best and best.solver == "VllmMoe" for best, _ in results.values())
        form = "vllm-moe" if of_vllm else "triton-json"
        run.tuna("export", "--session-id", "1", "--form", form, "-d", "out")
        (path,) = (run.home / "out").rglob("E=*.json" if of_vllm else "*.triton.json")
        by_label = {} if of_vllm else json.loads(path.read_text())["tiles"]
        pairs = []
        for layer in layers:
            best, default = results.get(layer.text(), (None, None))
            if best is None or default is None:
                continue
            if of_vllm:
                tile = read_tiles(path)[1][layer.tokens]
            else:
                tile = by_label[run.environment()["arch"]][best.solver][layer.label]
            tuned = tile_text({name: tile[name] for name in AXES})
            if not of_vllm and default.time_ms < GAIN * best.time_ms:
                tuned = default.params  # as vLLM's folder would have it
            common = {"config": layer.to_json(), "solver": best.solver}
            pairs.append({**common, "default": default.params, "tuned": tuned})
        return pairs

    def _compared(self, run: Run, pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answers of `gpu_versus`; a pair of the same tile is not timed."""
        differ = [one for one in pairs if tile_of(one["default"]) != tile_of(one["tuned"])]
        same = [one for one in pairs if one not in differ]
        path, paths = run.home / "pairs.json", [os.environ.get("PYTHONPATH"), str(ROOT)]
        path.write_text(json.dumps(differ))
        seconds = max(30.0, min(LIMITS_S["versus"], self._left_s()) - 90)  # Triton compiles too
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "TRITON_CACHE_DIR": cache}
            env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            command = [sys.executable, "-m", "benchmarks.gpu_versus", str(path), str(seconds)]
            done = subprocess.run(
                command, env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=CALL_S
            )
        answers = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
        answers += [{"config": one["config"], "same": True} for one in same]
        if len(answers) < len(pairs):
            answers.append({"failed": f"gpu_versus ended with code {done.returncode}"})
        return answers

    def _tuned(self, name: str, layers: Sequence[Config], options: Sequence[str]) -> Run:
        run = self._run(name)
        shutil.rmtree(run.home, ignore_errors=True)
        run.tune(layers, options, self._until())
        self._keep(run)
        return run

    def _run(self, name: str) -> Run:
        return Run(name, self.folder / name)

    def _of_part(
        self,
        run: Run,
        layers: Sequence[Config],
        budget: Mapping[str, float],
        limits: Mapping[str, float],
    ) -> Outcome:
        outcome = Outcome(
            *("gpu", run.figures),
            budget={"layers": float(len(layers)), **budget},
            limits={"seconds": LIMITS_S.get(run.name, CALL_S), "wrong": 0.0, **limits},
        )
        return self.told(run.name, outcome)

    def _options(self, *, exhaustive: bool) -> list[str]:
        """Job options; of the stand-in few candidates, for nothing is learnt from more."""
        few = self.candidates or (6 if self.stand_in else 0)
        limit = ["--candidates", str(few)] if few else []
        # tiles that spill most registers take 20 seconds of a core, and are slow for it
        limit += ["--option", f"build_timeout_s={60 if self.stand_in else 6}"]
        return [*limit, *(["--strategy", "exhaustive"] if exhaustive else [])]

    def _keep(self, run: Run) -> None:
        """Add every trial to the file that was asked for."""
        if self.trials:
            add_trials(self.trials, run, stand_in=self.stand_in)

    def _until(self) -> float:
        return self.started + self.call_s

    def _left_s(self) -> float:
        return self._until() - time.monotonic()


def _stand_in(argv: Sequence[str], home: Path | None) -> bool:
    """Whether there is no device: then this program starts again beside a stand-in of its driver,
    which the loader finds by a variable that it reads at the start."""
    if _STAND_IN in os.environ:
        return os.environ[_STAND_IN] == "1"
    # in a process of its own, for an open device takes memory
    looked = subprocess.run(
        [sys.executable, "-c", "from tuna_triton.driver import Cuda; Cuda()"],
        capture_output=True,
        text=True,
        check=False,
    )
    if looked.returncode:
        (*_, why) = looked.stderr.splitlines()
        if "DeviceLost" not in why:
            raise SystemExit(looked.stderr)
        print(f"beside a stand-in: {why}", file=sys.stderr, flush=True)
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "tuna-triton" / "tests")]
        stand_in = importlib.import_module("cuda_double.stand_in")
        with tempfile.TemporaryDirectory() as scratch:
            folder = home.absolute() / "stand_in" if home else Path(scratch)
            variables = {**stand_in.variables(stand_in.install(folder)), _STAND_IN: "1"}
            paths = variables["PYTHONPATH"], os.environ.get("PYTHONPATH")
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            command = [sys.executable, "-m", "benchmarks.gpu", *argv]
            if "--run" in argv:  # seconds of a run are those of a device at work
                (folder / "real_time").touch()
            done = subprocess.run(command, env={**os.environ, **variables}, check=False)
        raise SystemExit(done.returncode)
    os.environ[_STAND_IN] = "0"
    return False


if __name__ == "__main__":
    sys.exit(main())

"""Faults that are planted in built models, and right models: how many of the former the check of a
built model finds, and how many of the latter it refuses.

A fault is another conversion of one ONNX operator to Relax (`planted_faults.py`,
`planted_layers.py`), planted between the import, which says from what inputs are drawn, and the
build. Inputs, right answers and rules are those of `tuna tune model.onnx -o model.so`; kernels are
predicted. The right models (`planted_models.py`) are those of ONNX's node tests, those of the
tests, and what the scripts in a folder write (`--scripts`, by default `../shared/data/strangers`
where it is), but for those that are refused at the import, or differ on random inputs already,
where ONNX's reference is wrong. Faults that are not found and right models that are refused go to
stderr, with the inputs that were drawn.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

from benchmarks import forked, planted_faults, planted_layers  # noqa: F401  faults are in FAULTS
from benchmarks.harness import Outcome, command_line
from benchmarks.planted_models import Subject, Verdict, right_models
from benchmarks.planting import FAULTS

ROOT = Path(__file__).resolve().parents[1]
#: Seconds for a model, models of a process, and processes.
_TIMEOUT_S, _PART, _PROCESSES = 240.0, 10, 2
_QUIET = ("right", "skipped")


def judge(subject: Subject) -> Verdict:
    """Import, build and check a model in this process, whose working folder goes with it."""
    from tuna.errors import BadInput

    started = time.monotonic()
    try:
        # what is loaded is unpacked in the working folder
        with tempfile.TemporaryDirectory() as name:
            os.chdir(name)
            verdict = _checked(subject, Path(name))
    except BadInput as error:
        verdict = Verdict("skipped", str(error))
    except Exception as error:  # what is not refused in a sentence is named
        verdict = Verdict("raw", f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}")
    return replace(verdict, seconds=time.monotonic() - started)


def _checked(subject: Subject, folder: Path) -> Verdict:
    import onnx
    from tvm.target import codegen

    from tuna_models import child
    from tuna_models.child_answers import ModelFile, WrittenAnswers
    from tuna_models.judging import bounds
    from tuna_models.reading import importer

    compiled = importlib.import_module("compiled")  # of the tests
    path, target = folder / "model.onnx", {"kind": "llvm", "num-cores": 1}
    target["mcpu"] = str(codegen.llvm_get_system_cpu())
    onnx.save(subject.model(), path)
    model = importer.read(path, subject.shapes, None, subject.values)
    module = importer.to_relax(model, path.name)
    declared = importer.inputs_of(model)
    drawn = [
        {**one, "bounds": followed["bounds"]}
        for one, followed in zip(declared, bounds.of(module), strict=True)
    ]
    file = ModelFile(
        path=str(path),
        shapes={one["name"]: one["shape"] for one in declared},
        values=dict(subject.values),
        precision=subject.precision,
    )
    said = WrittenAnswers.model_validate(
        child.answer(
            model=file.model_dump(),
            given={"inputs": drawn, "seed": 0, "recorded": ""},
            by="",
            output=str(folder / "answers.npz"),
        )
    )
    if said.unanswered:
        return Verdict("skipped", said.unanswered)
    built_in = subject.precision
    if subject.fault is not None:
        with mock.patch.object(importer, "Importer", subject.fault.importer()):
            module = importer.to_relax(model, path.name)
        built_in = type(built_in).FP32
    problem, runs = compiled.answer(folder, target, module, built_in)
    word = "wrong" if problem.error(runs) > problem.tolerance else "right"
    first = replace(problem, answers=replace(problem.answers, cases=problem.answers.cases[:1]))
    if subject.fault is None and first.error(runs[:1]) > problem.tolerance:
        word = "differs"
    return Verdict(word, problem.report(runs), said.rule)


def judged(subjects: Sequence[Subject]) -> list[Verdict]:
    """Judge models in a forked process; a model that ends it, or takes too long, is raw."""
    return forked.judged(judge, subjects, functools.partial(Verdict, "raw"), _TIMEOUT_S)


def _all(subjects: Sequence[Subject]) -> list[Verdict]:
    parts = [subjects[start : start + _PART] for start in range(0, len(subjects), _PART)]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        return [verdict for part in pool.map(judged, parts) for verdict in part]


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    strangers = ROOT.parent / "shared" / "data" / "strangers"
    parser.add_argument("--scripts", type=Path, default=strangers, help=f"default: {strangers}")
    parser.add_argument("--models", type=int, default=200, help="right models, default: 200")
    parser.add_argument("--only", default="", help="faults and models with this text in their name")
    parser.add_argument("--verbose", action="store_true", help="each verdict to stderr")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / part) for part in ("tests", "packages/tuna-models/tests")]
    import tvm.relax.frontend.onnx  # noqa: F401  before the forks

    planted = [Subject.of(fault) for fault in FAULTS if options.only in fault.name]
    with tempfile.TemporaryDirectory() as name:
        right = right_models(options.scripts, Path(name))
        right = [subject for subject in right if options.only in subject.name]
        verdicts, alarms = _all(planted), _judged_until(right, options.models)
    kinds = {fault.kind for fault in FAULTS}
    figures: dict[str, float] = {
        "faults": len(planted),
        "found": 0,
        "right_models": 0,
        "false_alarms": 0,
    }
    figures |= {"differ_on_random": 0, "raw": 0}
    figures |= {f"found_{kind}": 0 for kind in sorted(kinds)}
    for subject, verdict in zip(planted, verdicts, strict=True):
        assert subject.fault is not None
        figures["found"] += verdict.word == "wrong"
        figures[f"found_{subject.fault.kind}"] += verdict.word == "wrong"
        _say("missed", subject, verdict, options.verbose or verdict.word != "wrong")
    for subject, verdict in alarms:
        figures["right_models"] += verdict.word in ("right", "wrong")
        figures["false_alarms"] += verdict.word == "wrong"
        figures["differ_on_random"] += verdict.word == "differs"
        figures["raw"] += verdict.word == "raw"
        _say("model", subject, verdict, options.verbose or verdict.word not in _QUIET)
    whole = not options.only
    return Outcome(
        "planted",
        figures,
        budget={"found": 38, "right_models": options.models} if whole else {},
        limits={"false_alarms": 0},
    ).print()


def _judged_until(subjects: Sequence[Subject], wanted: int) -> list[tuple[Subject, Verdict]]:
    """Judge models until enough of them were checked."""
    pairs: list[tuple[Subject, Verdict]] = []
    step = 2 * _PART * _PROCESSES
    while subjects and sum(each.word in ("right", "wrong") for _, each in pairs) < wanted:
        pairs += zip(subjects[:step], _all(subjects[:step]), strict=True)
        subjects = subjects[step:]
    return pairs


def _say(title: str, subject: Subject, verdict: Verdict, loud: bool) -> None:
    if loud:
        text = f"{verdict.text} [{verdict.rule}] {verdict.seconds:.1f} s"
        print(f"{title:8} {verdict.word:8} {subject.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

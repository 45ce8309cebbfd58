"""The zoo of `scripts/drill files`: the same files each time, and rules that find what they are
for."""

from __future__ import annotations

import ast
import json
import random
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.drills import encoding, files, healthy, operators, served, structure, zoo
from benchmarks.drills.doors import ROOT
from benchmarks.drills.judging import RULES, Run, faults
from benchmarks.drills.zoo import FILE, Expected, Numbered, Specimen
from tuna_models import child

_REFUSED = Specimen({FILE: b""}, ("Conv", "conv_1|weight"))
_GOOD = replace(_REFUSED, says=(), expected=Expected.ACCEPTED)
_RUN = Run(2, "Error: the operator Conv (conv_1) has strides of 0.\n", 1.0, 1 << 28, 0, ())


def test_every_kind_makes_the_same_file_again() -> None:
    numbered = [each for each in zoo.chosen(7, len(zoo.KINDS)) if each.kind != "too_many_nodes"]
    for each in numbered:
        assert each.make().files == each.make().files, each
    other = Numbered("cut_off", 1, 8)
    assert other.make().files != replace(other, seed=9).make().files
    assert served.requests(random.Random(3)) == served.requests(random.Random(3))


def test_the_zoo_has_the_kinds_that_the_drill_promises() -> None:
    good = [name for name, maker in zoo.KINDS.items() if maker.__module__ == healthy.__name__]
    assert len(zoo.KINDS) > 100
    assert len(good) >= 0.05 * len(zoo.KINDS)
    assert all(Numbered(name, 0, 7).make().expected is Expected.ACCEPTED for name in good)
    assert [str(each) for each in zoo.chosen(7, 3, "noise")] == ["noise:0", "noise:1", "noise:2"]
    assert [str(each) for each in zoo.chosen(7, 3, "noise:5")] == ["noise:5"]


@pytest.mark.parametrize(
    ("specimen", "run", "rule"),
    [
        (_REFUSED, _RUN, None),
        (_REFUSED, replace(_RUN, text="Error: the operator Conv (c) is wrong."), "unnamed"),
        (_REFUSED, replace(_RUN, code=0), "accepted_wrongly"),
        (_GOOD, replace(_RUN, code=0), None),
        (_GOOD, _RUN, "refused_wrongly"),
        (_REFUSED, replace(_RUN, code=1), "exit_codes"),
        (_REFUSED, replace(_RUN, code=-9), "exit_codes"),
        (_REFUSED, replace(_RUN, rows=2), "left_rows"),
        (_REFUSED, replace(_RUN, files=["artifacts/02"]), "left_files"),
        (_REFUSED, replace(_RUN, peak_bytes=(2 << 30) + 1), "over_memory"),
        (_REFUSED, replace(_RUN, seconds=60.5), "over_time"),
        *(
            (_REFUSED, replace(_RUN, text=f"{_RUN.text} {text}"), rule)
            for text, rule in [
                ("Traceback (most recent call last):", "tracebacks"),
                ("KeyError: 77", "tracebacks"),
                ("[ShapeInferenceError] (1) vs (2)", "tracebacks"),
                ("Wire format was corrupt.", "bare_texts"),
                ("'NoneType' object has no attribute 'ty'", "bare_texts"),
                ("x cannot be imported: 'sw'.", "bare_texts"),
                ("x cannot be imported: 999.", "bare_texts"),
                ("TVM: src/ir/x.cc:12", "bare_texts"),
                ("\x1b[2J", "control_characters"),
                ("\u202egnp", "control_characters"),
                ("n" * 3000, "long"),
            ]
        ),
    ],
)
def test_a_run_breaks_a_rule(specimen: Specimen, run: Run, rule: str | None) -> None:
    assert [fault.rule for fault in faults(specimen, run)] == ([rule] if rule else [])
    assert rule is None or rule in RULES


#: Kinds that are refused by what is read, without a cost that a fault would make us pay.
_CHEAP = [
    name
    for name, maker in zoo.KINDS.items()
    if maker.__module__ in (each.__name__ for each in (encoding, operators, structure))
]


@pytest.mark.parametrize("name", _CHEAP)
def test_a_broken_file_is_refused_by_a_sentence_with_its_words(name: str, tmp_path: Path) -> None:
    specimen = Numbered(name, 0, 7).make()
    path = specimen.write(tmp_path)
    target = json.dumps({"kind": "llvm", "num-cores": 1})
    answer = child.inspect(asked={"path": str(path), "target": target}, text=str(tmp_path / "text"))
    text = f"{answer.get('refused', '')} {answer.get('hint', '')}"
    run = Run(2 if "refused" in answer else 0, text, 0.0, 0, 0, ())
    assert list(faults(specimen, run)) == [], text


@pytest.mark.drill(only=True)
def test_the_zoo_is_refused_and_accepted_as_it_has_to_be(capfd: pytest.CaptureFixture[str]) -> None:
    command = [str(ROOT / "scripts/drill"), "files", "--seed", "5", "--count", str(len(zoo.KINDS))]
    assert subprocess.run(command).returncode == 0, capfd.readouterr().err


def test_the_drill_says_how_a_fault_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = (Numbered("noise", 3, 9), "import", _RUN, list(faults(_GOOD, _RUN)))
    files.shown(verdict)
    assert "scripts/drill files --seed 9 --only noise:3\n" in capsys.readouterr().err
    assert files.outcome([verdict], 1.0).missed == {"refused_wrongly"}


#: Modules that read a stranger's model.
READERS = """
costs file_kinds fold functions importer inference known misfits obstacles onnx_files opsets
operator_forms qoperators torch_importer torch_packages wellformed
"""


def raises_of(module: str) -> list[tuple[ast.Raise, str]]:
    """The statements that raise, each with the handler around it, as text."""
    spec = find_spec(f"tuna_models.reading.{module}")
    assert spec is not None
    assert spec.origin is not None
    found = list[tuple[ast.Raise, str]]()

    def walk(at: ast.AST, handled: str) -> None:
        if isinstance(at, ast.ExceptHandler):
            handled = at.name or ""
        if isinstance(at, ast.Raise):
            found.append((at, handled))
        for inner in ast.iter_child_nodes(at):
            walk(inner, handled)

    walk(ast.parse(Path(spec.origin).read_text()), "")
    return found


@pytest.mark.parametrize("module", READERS.split())
def test_what_a_reader_raises_is_a_sentence_of_its_own_with_what_to_do(module: str) -> None:
    for raised, caught in raises_of(module):
        error = raised.exc
        if error is None or isinstance(
            error, (ast.Name, ast.Attribute)
        ):  # passed on, or for the module alone
            continue
        assert isinstance(error, ast.Call)
        title = ast.unparse(error.func)
        where = f"{module}.py:{raised.lineno}"
        if title.startswith("_") or title.endswith(("refusal", "_refusal")):
            continue  # one of this module, or a function that makes the error
        if title in {"ValueError", "Unsupported", "AttributeError"}:
            continue  # caught by the module, or followed by the node's name
        of_node = {"Refusal.of", "Refusal.said_of"}
        assert title in {"BadInput", "LibraryMissing", "Obstacles", "Refusal", *of_node}, where
        words = error.args[title in of_node]
        assert caught == "" or f"str({caught})" not in ast.unparse(words), where
        assert title != "BadInput" or isinstance(words, ast.JoinedStr), where  # names the file
        hinted = len(error.args) >= {"Refusal": 2, **dict.fromkeys(of_node, 3)}.get(title, 9)
        assert hinted or any(each.arg == "hint" for each in error.keywords), where

"""Options from files: `@FILE` on a command line, with what is wrong named by file and line."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from tuna.errors import BadInput, NotFound
from tuna_remote.cli.at_files import AtFileCommand
from tuna_remote.cli.rpc_master import tune_rpc

SEEN: dict[str, object] = {}


@click.command(cls=AtFileCommand, refused={"old": "it is gone"})
@click.option("-n", "--number", type=click.IntRange(1, 9))
@click.option("--word", "words", multiple=True)
@click.option("--flag", is_flag=True)
@click.option("--one")
def command(**given: object) -> None:
    """Note what it gets."""
    SEEN.clear()
    SEEN.update(given)


def run(*words: str) -> dict[str, object]:
    command.main(list(words), standalone_mode=False)
    return dict(SEEN)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_stands_for_its_options(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "number: 3\nflag: true\nword:\n  - -x y\n  - {b: [1, 2]}\n  - 7\none: {a: 'b c'}\n"
    )
    found = run("@a.yaml")
    assert found == {
        "number": 3,
        "flag": True,
        "words": ("-x y", '{"b": [1, 2]}', "7"),
        "one": '{"a": "b c"}',
    }


def test_what_comes_later_counts(folder: Path) -> None:
    (folder / "a.yaml").write_text("number: 3\nword: [a]\nflag: false\n")
    (folder / "b.yaml").write_text("number: 4\nword: b\n")
    assert run("@a.yaml", "@b.yaml", "--word", "c") == {
        "number": 4,
        "flag": False,
        "words": ("a", "b", "c"),
        "one": None,
    }
    assert run("@b.yaml", "@a.yaml")["number"] == 3
    assert run("@a.yaml", "-n", "5")["number"] == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("word: a\nnumbr: 3", "f.yaml:2: command has no option 'numbr'"),
        ("one: 1\nold: x", "f.yaml:2: command has no old: it is gone"),
        ("\nnumber: 33", "f.yaml:2: number: 33 is not in the range"),
        ("flag: maybe", "f.yaml:1: flag is true or false"),
        ("one: true", "f.yaml:1: one takes a value, not 'true'"),
        ("one:", "f.yaml:1: one takes a value"),
        ("one: [a, b]", "f.yaml:1: one takes one value, not 2"),
        ("one: !!python/object/apply:os.system [x]", "f.yaml:1: .*tags are not taken"),
        ("word:\n  - a\n  - !Workload b", "f.yaml:3: .*tags are not taken"),
        ("one: &a b\nword: *a", "f.yaml:2: an alias"),
        ("one: a\none: b", "f.yaml:2: 'one' is given twice"),
        ("- a\n", "f.yaml:1: a mapping is expected"),
        ("one: {a", "f.yaml:1: this is not YAML"),
        ("", "f.yaml is empty"),
        ("one: " + "[" * 3000 + "]" * 3000, "f.yaml:1: this is nested too deeply"),
    ],
)
def test_faults_have_a_file_and_a_line(folder: Path, text: str, said: str) -> None:
    (folder / "f.yaml").write_text(text)
    with pytest.raises(BadInput, match=said):
        run("@f.yaml")


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    (folder / "f.yaml").write_bytes(b"\xff\xfe")
    for name, said in (
        ("f.yaml", "not UTF-8"),
        ("none.yaml", "cannot be read: No such file"),
        (".", "is not a plain file"),
    ):
        with pytest.raises(BadInput, match=said):
            run(f"@{name}")
    with pytest.raises(BadInput, match="command has no --old: it is gone"):
        run("--old=3")


def parse(*words: str) -> dict[str, object]:
    return tune_rpc.make_context("tune-rpc", list(words)).params


def test_workloads_are_layers(folder: Path) -> None:
    (folder / "w.yaml").write_text(
        "rpc: {target: llvm, port: 1}\n"
        "workload:\n"
        "  - MIOpenDriver gemm -m 32 -n 16 -k 8\n"
        "  - {kind: gemm, m: 32, n: 16, k: 8}\n"
        '  - \'{"kind": "gemm", "m": 32, "n": 16, "k": 8}\'\n'
        "  - |\n    kind: gemm\n    m: 32\n    n: 16\n    k: 8\n"
        "  - MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 5\n"
    )
    found = parse("@w.yaml")["workloads"]
    assert isinstance(found, tuple)
    assert len({one.config.key for layers in found[:4] for one in layers}) == 1
    assert [one.config.direction.value for one in found[4]] == ["F", "W"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rpc:\n  target: llvm\n  prot: 3", "w.yaml:3: rpc has no 'prot'"),
        ("rpc: {target: llvm}", "w.yaml:1: rpc: rpc needs port"),
        ("rpc: {target: llvm, port: x}", "w.yaml:1: rpc: rpc's port is a number"),
        ("rpc: {target: llvm, port: 65536}", "a number from 0 to 65535"),
        ("rpc: {target: 3, port: 1}", "rpc's target is a text"),
        (
            "workload:\n- MIOpenDriver gemm -m 1 -n 1 -k 1\n- MIOpenDriver gemm -m x",
            "w.yaml:3: workload: ",
        ),
        ("workload:\n- {kind: gemm, m: 3}", "w.yaml:2: workload: a gemm config needs n, k"),
        ("workload:\n- {kind: gem, m: 3}", "w.yaml:2: workload: .*gem"),
        (
            "workload: ['!AutoTVMWorkload {task_name: dense}']",
            "w.yaml:1: workload: a workload with a Python class tag",
        ),
        ("workload: ['!!python/object:lorien.W {a: 1}']", "Python class tag is code or a pickle"),
        (
            "workload: ['a: !!binary gASVCgAAAAAAAACMBmJvb20hlC4=']",
            "Python class tag is code or a pickle",
        ),
        ("db: {endpoint_url: x}", "w.yaml:1: tune-rpc has no db: results are in Tuna's database"),
        ("ntrial: 0", "w.yaml:1: ntrial: 0 is not in the range"),
        ("commit-nbets: 3", "w.yaml:1: tune-rpc has no option 'commit-nbets'"),
    ],
)
def test_a_masters_faults_have_a_file_and_a_line(folder: Path, text: str, said: str) -> None:
    (folder / "w.yaml").write_text(text)
    with pytest.raises((BadInput, NotFound), match=said):
        parse("@w.yaml")


def test_the_files_of_the_documentation_are_read(folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rpc.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```yaml\n")[1:]]
    assert [block.splitlines()[0] for block in blocks] == ["# tune_rpc.yaml", "# workloads.yaml"]
    for block in blocks:
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    found = parse("@tune_rpc.yaml", "@workloads.yaml")
    assert (found["ntrial"], found["table"], found["n_best"]) == (16, "lorien-data", 3)
    assert isinstance(found["workloads"], tuple)
    assert len(found["workloads"]) == 2
    table = page.split("## Options")[1].split("\n\n")[1]
    named = {
        name
        for row in table.splitlines()[2:]
        for name in row.split("|")[1].replace("`", "").split(", ")
    }
    options = {max(one.opts, key=len).removeprefix("--") for one in tune_rpc.params}
    assert {name.strip() for name in named} == options, "each option has its row"

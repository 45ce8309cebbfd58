"""`go_fish.py --yaml`: several steps from one file, checked as a whole first."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuna.errors import BadInput
from tuna_mituna import yaml_steps
from tuna_mituna.go_fish import go_fish


def lines_of(document: dict[str, Any], library: str = "noop") -> list[list[str]]:
    return yaml_steps.command_lines(document, library, go_fish)


def test_steps_become_command_lines_in_their_order() -> None:
    document = {
        "library": "miopen",
        "session_id": 3,
        "arch": "gfx908",
        "import_configs": {
            "enabled": True,
            "tag": "resnet50",
            "file_name": "a b.txt",
            "batches": [1, 32],
        },
        "init_session": {"enabled": True, "label": "it's 'quoted'"},
        "update_solvers": {"enabled": False},
        "load_job": {"enabled": True, "tag": "resnet50", "label": "x", "only_dynamic": True},
        "fin_steps": [
            {"enabled": True, "fin_steps": "miopen_find_compile", "enqueue_only": True},
            {"enabled": True, "fin_steps": "miopen_find_eval", "enqueue_only": True},
        ],
    }
    lines = (
        "miopen import_configs --tag resnet50 --file_name 'a b.txt' --batches 1,32",
        """miopen --init_session --session_id 3 --arch gfx908 --label "it's 'quoted'" """,
        "miopen load_job --session_id 3 --arch gfx908 --tag resnet50 --label x --only_dynamic",
        *(
            f"miopen --session_id 3 --arch gfx908 --fin_steps {step} --enqueue_only"
            for step in ("miopen_find_compile", "miopen_find_eval")
        ),
    )
    assert lines_of(document) == [shlex.split(line) for line in lines]


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({"init_session": {"enabled": True, "labl": "x"}}, "labl"),
        ({"make_coffee": {"enabled": True}}, "make_coffee"),
        ({"init_session": {"label": "x"}}, "enabled"),
        ({"init_session": ["x"]}, "mapping"),
        ({"colour": "red", "add_tables": {"enabled": True}}, "colour"),
        ({"init_session": {"enabled": True, "label": "x", "num_cu": "many"}}, "many"),
        (
            {"fin_steps": {"enabled": True, "fin_steps": "a", "enqueue_only": "yes"}},
            "true or false",
        ),
        ({"load_job": {"enabled": True, "algo": "magic"}}, "magic"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(
    document: dict[str, Any], match: str
) -> None:
    with pytest.raises(BadInput, match=match):
        lines_of(document)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path, type_in: Callable[..., Any]) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(
        "fin_steps: {enabled: true, fin_steps: a}\nfin_steps: {enabled: true, fin_steps: b}\n"
    )
    ended = type_in("go_fish", "--yaml", path)
    assert ended.code == 2
    assert "twice" in ended.err


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: [", "!!python/object/apply:os.system ['true']", "\x00", ""]
)
def test_what_is_no_list_of_steps_is_refused(
    tmp_path: Path, type_in: Callable[..., Any], text: str
) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(text)
    ended = type_in("go_fish", "--yaml", path)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err


def test_no_argument_may_stand_beside_yaml(tmp_path: Path, type_in: Callable[..., Any]) -> None:
    (tmp_path / "steps.yaml").write_text("add_tables: {enabled: true}\n")
    assert (
        type_in("go_fish", "noop", "--yaml", tmp_path / "steps.yaml", "--session_id", 1).code == 2
    )


def test_a_file_prepares_a_session(
    tmp_path: Path, layers: Path, type_in: Callable[..., Any]
) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(f"""\
library: noop
session_id: 1
add_tables: {{enabled: true}}
init_session: {{enabled: true, label: nightly}}
import_configs: {{enabled: true, tag: small, file_name: {layers}}}
update_solvers: {{enabled: true}}
update_applicability: {{enabled: true}}
load_job: {{enabled: true, tag: small, label: nightly, fin_steps: [build, measure]}}
""")
    ended = type_in("go_fish", "--yaml", path)
    assert ended.code == 0, ended
    assert "New jobs added: 20" in ended.out


def test_the_first_step_that_fails_ends_a_yaml_file(
    tmp_path: Path, type_in: Callable[..., Any]
) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(
        "library: noop\nupdate_solvers: {enabled: true}\nlist_solvers: {enabled: true}\n"
        "update_applicability: {enabled: true, session_id: 9}\nadd_tables: {enabled: true}\n"
    )
    ended = type_in("go_fish", "--yaml", path)
    assert ended.code == 3
    assert "tables:" not in ended.out

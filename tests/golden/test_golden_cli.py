"""Command lines of `tuna golden` and `update_golden.py`: output and exit codes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended
from golden_scene import ASM, GEMM, A, B, C, Scene
from settings_changes import change_setting

from tuna import api
from tuna.cli.main import guarded, tuna
from tuna.cli.seeds import respell
from tuna.configs import parse_line
from tuna_mituna.db_files import update_golden

pytestmark = pytest.mark.both_databases_in_drills

#: Command line, exit code, part of the output.
NONSENSE: tuple[tuple[tuple[object, ...], int, str], ...] = (
    (("build", 3), 2, "needs a session, a base version, or both"),
    (("build", 3, "--session-id", 1), 2, "needs a base"),
    (("build", 3, "--session-id", 9, "--base", 2), 3, "Unknown session 9"),
    (("build", 3, "--base", 7), 3, "Unknown golden version 7"),
    (("build", 2, "--session-id", 2), 2, "add --overwrite"),
    (("build", 1, "--session-id", 2, "--overwrite"), 2, "is promoted and never changes"),
    (("build", -1, "--session-id", 2), 2, "No such option"),
    (("build", "1.1", "--session-id", 2), 2, "not a valid integer"),
    (("build", 2**31, "--session-id", 2), 2, "is not in the range"),
    (("build", 3, "--base", 2, "--library", "tvm"), 3, "Unknown golden version 2 of tvm"),
    (("report", 7), 3, "Unknown golden version 7"),
    (("report", 2, "--max-regression", "much"), 2, "is not a share"),
    (("report", 2, "--min-gain", "5"), 2, "is not a share; write 5% or 0.05"),
    (("report", 2, "--min-gain", "-1%"), 2, "is not a share"),
    (("report", 2, "--min-gain", "inf"), 2, "is not a share"),
    (("promote", 7), 3, "Unknown golden version 7"),
    (("rollback", "nosuch"), 3, "nosuch has no golden versions"),
    (("explain", 7, "1"), 3, "Unknown golden version 7"),
    (("--session_id", 2), 2, "golden_v"),
    (("--golden_v", 3), 2, "needs a session, a base version, or both"),
    (("--golden_v", 3, "--session_id", 2), 2, "most likely --base_golden_v 2"),
    (("--golden_v", 2, "--session_id", 2), 2, "add --overwrite"),
    (("--golden_v", 3, "--session_id", 2, "--base_golden_v", 7), 3, "Unknown golden version 7"),
    (
        ("--golden_v", 3, "--session_id", 2, "--base_golden_v", 2, "-C", "gem"),
        2,
        "did you mean gemm?",
    ),
)


TypeIn = Callable[..., Ended]


@pytest.fixture
def type_in(
    scene: Scene,
    tuna_home: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> TypeIn:
    """`type_in("build", 1, ...)` is `tuna golden build 1 ...`; `type_in("--golden_v", 1, ...)` is
    update_golden.py."""
    change_setting(
        monkeypatch, "TUNA_DB_URL", scene.engine.url.render_as_string(hide_password=False)
    )

    def run(*words: object) -> Ended:
        line = [str(word) for word in words]
        capsys.readouterr()
        if line[0].startswith("-"):
            code = guarded(update_golden, line, name="update_golden.py", respell=respell)
        else:
            code = guarded(tuna, ["golden", *line])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def two(scene: Scene) -> Scene:
    """Sessions 1 and 2: the second has A faster by half, B slower by a tenth; C is new, D is in
    neither."""
    scene.network("Resnet50", {A: 3, B: 1})
    scene.session({(A, ASM): {"time_ms": 1.0, "code": [b"old"]}, (B, ASM): 1.0})
    scene.session({(A, ASM): 0.5, (B, ASM): 1.1, (C, GEMM): 3.0})
    return scene


@pytest.fixture
def built(two: Scene, type_in: TypeIn) -> TypeIn:
    """Version 1 of session 1, promoted; version 2 of session 2 on it, a draft."""
    for words in (
        ("build", 1, "--session-id", 1),
        ("promote", 1),
        ("build", 2, "--session-id", 2, "--base", 1),
    ):
        assert type_in(*words).code == 0
    return type_in


def test_a_release_from_its_build_to_its_rollback(two: Scene, type_in: TypeIn) -> None:
    ended = type_in("build", 1, "--session-id", 1)
    assert ended.code == 0
    assert (
        ended.out
        == "golden version 1 of miopen built: 2 entries with 1 kernel (2 from session 1, 0"
        " replaced, 0 imported)\n"
    )
    assert "next: `tuna golden report 1`, then `tuna golden promote 1`" in ended.err
    assert type_in("promote", 1).out == "golden version 1 of miopen is promoted\n"
    assert type_in("build", 2, "--session-id", 2, "--base", 1).code == 0
    ended = type_in("promote", 2, "--max-regression", "10%", "--min-gain", "0.3")
    assert ended == (
        0,
        "golden version 2 of miopen is promoted (against version 1: 1 faster, 1 slower)\n",
        "",
    )
    ended = type_in("rollback", "miopen")
    assert ended == (0, "golden version 2 of miopen is withdrawn; version 1 is current again\n", "")
    assert type_in("rollback", "miopen").out.endswith(
        "version 1 of miopen is withdrawn; no version is current\n"
    )
    assert type_in("rollback", "miopen").code == 2


def test_the_list_marks_the_current_version(built: TypeIn, two: Scene) -> None:
    two.build(1, two.session({(A, "TvmConvIm2col"): 2.0}, library="tvm"))
    out = _lines(built("list"))
    assert [line.split()[:4] for line in out if line.startswith(("miopen", "tvm"))] == [
        ["miopen", "1", "current", "promoted"],
        ["miopen", "2", "draft", "1"],
        ["tvm", "1", "draft", "-"],
    ]
    first, second, other = json.loads(built("list", "--json").out)
    assert (first["current"], first["state"], first["base_version"], first["entries"]) == (
        True,
        "promoted",
        None,
        2,
    )
    assert (second["current"], second["promoted_at"], second["base_version"]) == (False, None, 1)
    assert (other["library"], other["current"]) == ("tvm", False)
    assert [
        one["library"] for one in json.loads(built("list", "--library", "tvm", "--json").out)
    ] == ["tvm"]


def _lines(ended: Ended) -> list[str]:
    """The stripped output lines of a command that succeeded."""
    assert ended.code == 0
    return [line.strip() for line in ended.out.splitlines()]


def test_an_empty_list_says_how_to_begin(type_in: TypeIn) -> None:
    assert "tuna golden build VERSION --session-id ID" in type_in("list").out
    assert json.loads(type_in("list", "--json").out) == []


def test_a_report_by_model_with_a_gate(built: TypeIn) -> None:
    lines = _lines(built("report", 2))
    assert lines[0] == "golden version 2 of miopen against version 1"
    assert any(
        line.startswith("Resnet50 1 ") and "4 -> 2.6 ms (-35.00 %)" in line for line in lines
    )
    assert built("report", 2, "--max-regression", "10%", "--min-gain", "35%").code == 0
    ended = built("report", 2, "--max-regression", "5%", "--min-gain", "0.5")
    assert ended.code == 1
    # the report is printed nevertheless
    assert ended.out.startswith("golden version 2 of miopen against version 1\n")
    assert ended.err.count("violated: ") == 2
    assert (
        "violated: the total weighted time shrinks by 35 % instead of shrinking by 50 %"
        in ended.err
    )
    assert _lines(built("report", 2, "--against", 2))[0].endswith("against version 2")


@pytest.mark.parametrize("words", [("report", 2), ("report", 1, "--session-id", 2)])
def test_a_report_for_programs_has_the_violations_too(
    built: TypeIn, words: tuple[object, ...]
) -> None:
    ended = built(*words, "--json", "--max-regression", 0)
    assert ended.code == 1
    found = json.loads(ended.out)
    version, session = (2, None) if len(words) == 2 else (None, 2)
    assert (found["library"], found["version"], found["session_id"]) == ("miopen", version, session)
    assert (found["against"], found["left_out"], len(found["violations"])) == (1, 0, 1)
    assert found["models"][0]["name"] == "Resnet50 1"
    assert found["total"]["ratio"] == pytest.approx(0.65)
    assert found["regressions"][0]["ratio"] == pytest.approx(1.1)
    assert found["gains"][0]["after"]["session_id"] == 2


def test_a_session_is_held_against_a_version_and_nothing_is_built(
    two: Scene, type_in: TypeIn
) -> None:
    type_in("build", 1, "--session-id", 1)
    before = two.everything()
    lines = _lines(
        type_in("report", 1, "--session-id", 2, "--max-regression", "10%", "--min-gain", "35%")
    )
    assert lines[0] == "session 2 of miopen against version 1"
    ended = type_in("report", 1, "--session-id", 2, "--max-regression", "5%")
    assert ended.code == 1
    assert "violated: 1 layer is more than 5 % slower, the worst by 10 %" in ended.err
    ended = type_in("report", 1, "--session-id", 2, "--against", 1)
    assert ended.code == 2
    assert "leave --against away" in ended.err
    assert type_in("report", 1, "--session-id", 9).code == 3
    assert type_in("report", 9, "--session-id", 2).code == 3
    assert two.everything() == before


def test_a_promotion_that_the_gate_refuses_says_where_to_look(built: TypeIn, two: Scene) -> None:
    ended = built("promote", 2, "--max-regression", "5%")
    assert (ended.code, ended.out) == (1, "")
    assert (
        "Error: The golden version 2 of miopen is not promoted: 1 layer is more than 5 % slower"
        in ended.err
    )
    assert "look at: `tuna golden report 2 --against 1`" in ended.err
    assert two.states() == {1: "promoted", 2: "draft"}
    ended = built("promote", 1)
    assert ended.code == 2
    assert "is promoted already" in ended.err


def test_an_entry_is_explained_for_people_and_programs(built: TypeIn, two: Scene) -> None:
    asm = two.entries(2)[0]
    ended = built("explain", 2, A)
    assert ended.code == 0
    assert ended.out.startswith(f"#{asm.id} in version 2: ")
    assert "replaced that of version 1" in ended.out
    (found,) = json.loads(built("explain", 2, f"#{asm.id}", "--json").out)
    assert (found["entry"]["id"], found["entry"]["time_ms"], found["base"]["time_ms"]) == (
        asm.id,
        0.5,
        1.0,
    )
    assert (found["base_version"], len(found["base"]["kernels"]), found["entry"]["kernels"]) == (
        1,
        1,
        [],
    )
    assert "kernels" in found["changes"]
    assert built("explain", 2, A, "--solver", GEMM).code == 3
    ended = built("explain", 2, "nonsense")
    assert (ended.code, ended.out) == (3, "")
    assert "has no entry nonsense" in ended.err


def test_a_note_stays_with_a_release_and_a_line_of_an_export_is_explained(
    two: Scene, type_in: TypeIn, tmp_path: Path
) -> None:
    assert type_in("build", 1, "--session-id", 1).code == 0
    assert type_in("promote", 1, "--note", "for ROCm 7").code == 0
    (listed,) = json.loads(type_in("list", "--json").out)
    assert listed["note"] == "for ROCm 7"
    assert listed["promoted_by"].endswith(f"@{socket.gethostname()}")
    shown = type_in("list").out
    assert all(word in shown for word in ("for ROCm 7", listed["promoted_by"]))
    api.export_golden(1, "find", tmp_path, arch="gfx90a", num_cu=104, library="miopen")
    (file,) = tmp_path.glob("*.fdb.txt")
    keys = set()
    for line in (1, 2):
        (found,) = json.loads(type_in("explain", 1, f"{file}:{line}", "--json").out)
        keys.add(found["entry"]["config_key"])
        assert found["history"][0]["note"] == "for ROCm 7"
    assert keys == {parse_line(one)[0].key for one in (A, B)}
    ended = type_in("explain", 1, f"{file}:3")
    assert (ended.code, ended.out) == (2, "")
    assert "has no line 3" in ended.err


def test_what_makes_no_sense_is_one_sentence_and_writes_nothing(built: TypeIn, two: Scene) -> None:
    before = two.everything()
    for words, code, said in NONSENSE:
        ended = built(*words)
        assert (ended.code, ended.out) == (code, ""), words
        assert said in ended.err, words
        assert "Traceback" not in ended.err
    assert two.everything() == before


def test_the_seeds_way_builds_overwrites_and_grows_versions(two: Scene, type_in: TypeIn) -> None:
    ended = type_in("--session_id", 1, "--golden_v", 0)
    assert (ended.code, ended.out.split(":")[0]) == (0, "golden version 0 of miopen built")
    ended = type_in("--session_id", 2, "--golden_v", 1, "--base_golden_v", 0)  # 0 counts as given
    assert "3 entries with 0 kernels (3 from session 2, 2 replaced, 0 imported)" in ended.out
    # the session's numbers, the slower one too
    assert sorted(two.times(1).values()) == [0.5, 1.1, 3.0]
    ended = type_in("--session_id", 1, "--golden_v", 1, "--overwrite")
    assert "golden version 1 of miopen overwritten: 3 entries" in ended.out
    assert sorted(two.times(1).values()) == [1.0, 1.0, 3.0]
    ended = type_in("--session_id", 2, "--golden_v", 1, "--base_golden_v", 0, "--overwrite")
    assert "3 entries with 0 kernels (3 from session 2, 3 replaced, 0 imported)" in ended.out, (
        "each is counted once"
    )
    assert type_in("--golden_v", 2, "--base_golden_v", 1).code == 0
    assert two.states() == {0: "draft", 1: "draft", 2: "draft"}


def test_the_seeds_way_takes_a_kind_and_imported_results_on_demand(
    two: Scene, type_in: TypeIn
) -> None:
    two.result(1, C, ASM, 2.0, source="gfx90a68.db sha256:1f")
    ended = type_in("--session_id", 1, "--golden_v", 1)
    assert (ended.code, ended.out) == (2, "")
    assert "1 were imported, not measured" in ended.err
    ended = type_in("--session_id", 1, "--golden_v", 1, "--allow_imported", "-C", "convolution")
    assert "3 entries" in ended.out
    assert "1 imported" in ended.out
    ended = type_in("--session_id", 1, "--golden_v", 1, "-o", "-C", "batch_norm")
    assert ended.code == 2
    assert "has no results for batch_norm" in ended.err

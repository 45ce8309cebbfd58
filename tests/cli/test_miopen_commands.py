"""The seeds' commands for MIOpen, each against the double of fin: what they add, what they
refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from queries import read_column

from tuna.db.engine import make_engine
from tuna.db.models import ConfigRow, ConfigTag, Job, ModelConfig, SolverRow
from tuna.settings import get_settings

TypeIn = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
LAYERS = """\
./bin/MIOpenDriver conv -n 4 -c 64 -H 28 -W 28 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1
./bin/MIOpenDriver convfp16 -n 4 -c 64 -H 28 -W 28 -k 64 -y 3 -x 3 -p 1 -q 1 -F 2
64-28-28-3x3-64-28-28-4-1x1-1x1-1x1-0-NCHW-FP32-W=
./bin/MIOpenDriver bnorm -n 32 -c 64 -H 54 -W 54 -m 1 --forw 1 -b 0 -s 1 -r 1
"""


def query(statement: sa.Select[Any]) -> list[Any]:
    return read_column(make_engine(get_settings().sql_url), statement)


@pytest.fixture
def fish(home: Path, type_in: TypeIn, rocm: Callable[..., Path], tmp_path: Path) -> TypeIn:
    """`fish("go_fish", ...)` after a session with layers, solvers and applicability."""
    rocm()
    (tmp_path / "layers.txt").write_text(LAYERS)
    for words in (
        ("go_fish", "--add_model", "Resnet50", "--md_version", "1"),
        ("go_fish", "--add_framework", "Pytorch", "--fw_version", "1"),
        (
            "go_fish",
            "miopen",
            "import_configs",
            "-t",
            "net",
            "-f",
            "layers.txt",
            "--model",
            "Resnet50",
            "--md_version",
            1,
            "--framework",
            "Pytorch",
            "--fw_version",
            1,
        ),
        ("go_fish", "miopen", "--update_solvers"),
        ("go_fish", "miopen", "--init_session", "-l", "reason"),
        ("go_fish", "miopen", "--update_applicability", "--session_id", 1),
    ):
        ended = type_in(*words)
        assert ended.code == 0, ended
    return type_in


def test_layers_keys_and_batch_norm_are_imported_with_their_weights(fish: TypeIn) -> None:
    assert sorted(query(sa.select(ConfigRow.kind))) == ["batch_norm"] + ["convolution"] * 3
    assert query(sa.select(ModelConfig.weight)) == [1] * 4
    again = fish("go_fish", "miopen", "import_configs", "-t", "net", "-f", "layers.txt")
    assert "4 layers: 0 added, 0 newly tagged" in again.out


def test_a_second_fin_step_in_the_same_session_is_possible(fish: TypeIn) -> None:
    load = ("load_job", "--session_id", 1, "-t", "net", "-o", "-l", "reason", "--fin_steps")
    perf = fish(*load, "miopen_perf_compile,miopen_perf_eval")
    find = fish(*load, "miopen_find_compile,miopen_find_eval")
    assert perf.code == find.code == 0
    assert perf.out == find.out
    assert int(find.out.split(":")[1]) > 10
    assert "New jobs added: 0" in fish(*load, "miopen_find_compile,miopen_find_eval").out
    assert len(set(query(sa.select(Job.steps)))) == 2


@pytest.mark.parametrize(
    ("words", "code", "match"),
    [
        (("-t", "nosuch"), 3, "No config has the tag 'nosuch'"),
        (("-t", "net", "-s", "NoSuchSolver"), 3, "no solver 'NoSuchSolver'"),
        (("-t", "net", "-s", "4242"), 3, "no solver '4242'"),
        (("-t", "net", "--fin_steps", "miopen_bake"), 3, "miopen_bake"),
        (("-t", "net", "--all_configs"), 2, "either -t TAG or --all_configs"),
        ((), 2, "either -t TAG or --all_configs"),
        (("-t", "net", "-A", "miopenConvolutionAlgoFFT", "-s", "fft"), 2, "not both"),
        (("-t", "net", "-a", "gfx906"), 2, "is for gfx908"),
        (("-t", "net' or '1'='1"), 3, "No config has the tag"),
    ],
)
def test_jobs_that_make_no_sense_are_refused_and_none_is_added(
    fish: TypeIn, words: tuple[str, ...], code: int, match: str
) -> None:
    ended = fish("load_job", "--session_id", 1, "-l", "x", *words)
    assert ended.code == code, ended
    assert match in ended.err
    assert query(sa.select(Job.id)) == []


def test_jobs_by_algorithm_solver_flags_and_precision(fish: TypeIn) -> None:
    def added(*words: object) -> set[str]:
        before = set(query(sa.select(Job.id)))
        ended = fish("load_job", "--session_id", 1, "--all_configs", "-l", "x", *words)
        assert ended.code == 0, ended
        names = (
            sa.select(SolverRow.name)
            .join(Job, Job.solver_id == SolverRow.id)
            .where(Job.id.not_in(before))
        )
        return set(query(names))

    steps = ("--fin_steps", "miopen_find_compile,miopen_find_eval")
    assert added("-s", "ConvDirectNaiveConvFwd,1", *steps) == {
        "ConvDirectNaiveConvFwd",
        "ConvAsm3x3U",
    }
    gemm = added("-A", "miopenConvolutionAlgoGEMM", *steps)
    assert gemm
    assert all(name.startswith("Gemm") for name in gemm)
    dynamic = added("-d", "--fin_steps", "miopen_perf_compile")
    assert dynamic == set(
        query(sa.select(SolverRow.name).where(SolverRow.dynamic, SolverRow.name.in_(dynamic)))
    )
    tunable = added("--tunable", "--fin_steps", "miopen_perf_compile,miopen_perf_eval")
    assert tunable == set(
        query(sa.select(SolverRow.name).where(SolverRow.tunable, SolverRow.name.in_(tunable)))
    )
    half = added("-c", "convfp16")
    configs = (
        sa.select(ConfigRow.driver)
        .join(Job, Job.config_id == ConfigRow.id)
        .where(Job.steps.like("%perf%find%"))
    )
    assert half
    assert all("convfp16" in driver for driver in query(configs))


def test_the_solvers_are_listed_by_miopens_ids_with_exit_code_0(fish: TypeIn) -> None:
    ended = fish("go_fish", "miopen", "--list_solvers")
    assert ended.code == 0
    assert "ConvAsm3x3U" in ended.out
    assert "BnCKFwdTraining" in ended.out


def test_a_device_that_is_elsewhere_is_given_by_hand(fish: TypeIn) -> None:
    ended = fish(
        "go_fish",
        "miopen",
        "--init_session",
        "-l",
        "new",
        "-a",
        "gfx950",
        "-n",
        256,
        "--miopen_v",
        "3.5.0.x",
    )
    assert ended.code == 0
    assert "session 2 (new): miopen 3.5.0.x, gfx950 x 256" in ended.out


def test_a_model_that_was_not_added_is_refused_before_anything_is_written(
    fish: TypeIn, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text("MIOpenDriver conv -n 99 -F 1\n")
    words = (
        "-t",
        "more",
        "-f",
        "more.txt",
        "--md_version",
        "1",
        "--framework",
        "Pytorch",
        "--fw_version",
        "1",
    )
    ended = fish("go_fish", "miopen", "import_configs", *words, "--model", "Vgg16")
    assert ended.code == 3
    assert "Resnet50 1" in ended.err
    assert query(sa.select(ConfigTag.config_id).where(ConfigTag.tag == "more")) == []
    assert len(query(sa.select(ConfigRow.id))) == 4
    assert fish("go_fish", "miopen", "import_configs", *words).code == 2


def test_import_options(fish: TypeIn) -> None:
    one = "MIOpenDriver conv -n 7 -c 8 -H 9 -W 9 -k 8 -y 3 -x 3 -F 1"
    ended = fish(
        "go_fish",
        "miopen",
        "import_configs",
        "-t",
        "b",
        "-d",
        one,
        "-b",
        "1,2,4",
        "-c",
        "convbfp16",
    )
    assert ended.code == 0, ended
    drivers = query(sa.select(ConfigRow.driver).join(ConfigTag).where(ConfigTag.tag == "b"))
    assert len(drivers) == 3
    assert all("convbfp16 --batchsize" in driver for driver in drivers)
    assert fish("go_fish", "miopen", "import_configs", "-d", one, "--mark_recurrent").code == 0
    assert query(sa.select(ConfigTag.recurrent).where(ConfigTag.tag == "no_tag")) == [True]
    assert fish("go_fish", "miopen", "--update_applicability", "--session_id", 1).code == 0
    again = ("load_job", "--session_id", 1, "--all_configs", "--recurrent", "-l", "release")
    assert fish(*again).code == 0, "the mark is used"
    marked = sa.select(ConfigTag.config_id).where(ConfigTag.recurrent.is_(True))
    assert set(query(sa.select(Job.config_id))) == set(query(marked))
    only = fish(
        "go_fish",
        "miopen",
        "import_configs",
        "-d",
        one.replace("-n 7", "-n 8"),
        "-t",
        "new",
        "--tag_only",
    )
    assert "0 added, 0 newly tagged" in only.out
    assert "1 layer is not there" in only.err
    for words in (("-b", "1,x"), ("-b", "0"), ("-c", "convfp8")):
        assert fish("go_fish", "miopen", "import_configs", "-d", one, "-t", "b", *words).code == 2
    assert fish("go_fish", "miopen", "import_configs", "--print_models").out.count("Resnet50") == 1


@pytest.mark.service
def test_status(fish: TypeIn) -> None:
    ended = fish("go_fish", "miopen", "-s")
    assert "gfx908 x 120" in ended.out
    assert "reason" in ended.out


def test_tables_are_added_twice_without_harm(home: Path, type_in: TypeIn) -> None:
    for _ in range(2):
        ended = type_in("go_fish", "miopen", "--add_tables")
        assert ended.code == 0
        assert "golden_entry" in ended.out


def test_the_yaml_of_the_documents_fills_its_session(
    home: Path, type_in: TypeIn, rocm: Callable[..., Path], tmp_path: Path
) -> None:
    """All of it but the steps that wait for workers."""
    rocm()
    page = (ROOT / "docs" / "miopen.md").read_text().split("## YAML")[1]
    lines = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    (tmp_path / "resnet50.txt").write_text(LAYERS)
    (tmp_path / "steps.yaml").write_text("\n".join(lines[: lines.index("fin_steps:")]))
    ended = type_in("go_fish", "--yaml", "steps.yaml")
    assert ended.code == 0, ended
    assert query(sa.select(sa.func.count()).select_from(Job).where(Job.session_id == 1))[0] > 0


def test_a_program_says_which_python_to_use_where_packages_are_missing() -> None:
    for name in (
        "go_fish.py",
        "load_job.py",
        "export_db.py",
        "update_golden.py",
        "tuna/example/load_job.py",
    ):
        command = [sys.executable, "-S", "-E", str(ROOT / name), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
        assert done.returncode == 1
        assert ".venv/bin/python" in done.stderr
        assert "Traceback" not in done.stderr

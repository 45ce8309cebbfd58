"""What MITuna's commands got wrong, done right: layers that were lost, mistakes that ended with
exit code 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from queries import read_rows

from tuna.configs import parse_line
from tuna.db import models
from tuna.db.engine import make_engine
from tuna.settings import get_settings

TypeIn = Callable[..., Any]
CONV = "./bin/MIOpenDriver conv -n 1 -c 8 -H 64 -W 64 -k 8 -y 3 -x 3"
#: One of each kind, three dimensions, a layout of its own.
MIXED = (
    f"{CONV} -p 1 -q 11 -F 2",
    "./bin/MIOpenDriver convfp16 --spatial_dim 3 -n 2 -c 8 -g 4 -k 8 -F 4 --in_layout NDHWC",
    "./bin/MIOpenDriver bnormfp16 -n 32 -c 64 -H 54 -W 54 -m 1 --forw 1 -b 0 -s 1 -r 1",
    "./bin/MIOpenDriver gemm --a_h 1 --a_w 2048 --b_w 1000",
)


@pytest.fixture
def imported(type_in: TypeIn, tmp_path: Path) -> Callable[..., Any]:
    """`imported(LINE, ...)`: what the import of a file with these lines prints."""

    def run(*lines: str) -> Any:
        (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
        return type_in("go_fish", "miopen", "import_configs", "-t", "net", "-f", "list.txt")

    return run


def listed(type_in: TypeIn) -> list[dict[str, Any]]:
    """The layers with the tag."""
    ended = type_in("tuna", "configs", "-t", "net", "--json")
    assert ended.code == 0
    return [json.loads(line) for line in ended.out.splitlines()]


def rows(statement: Any) -> list[Any]:
    """The rows of a query in the embedded database."""
    return read_rows(make_engine(get_settings().sql_url), statement)


def test_two_layers_that_collide_in_mituna_are_both_imported_and_tagged(
    imported: Callable[..., Any], type_in: TypeIn
) -> None:
    pair = [f"{CONV} -p 1 -q 11 -F 1", f"{CONV} -p 11 -q 1 -F 1"]
    ended = imported(*pair)
    assert ended.code == 0
    assert "2 layers: 2 added, 2 newly tagged 'net'" in ended.out
    assert [(layer["pad_h"], layer["pad_w"]) for layer in listed(type_in)] == [(1, 11), (11, 1)]
    assert "2 layers: 0 added, 0 newly tagged 'net'" in imported(*pair).out


@pytest.mark.parametrize("flags", ["", "-F 0", "--forw 0", "-F 7"])
def test_a_line_for_all_directions_is_imported_as_three_layers_and_counted(
    imported: Callable[..., Any], type_in: TypeIn, flags: str
) -> None:
    ended = imported(f"{CONV} {flags}")
    assert ended.code == 0
    assert "1 line: 1 accepted (1 of them name several directions" in ended.out
    assert "3 layers: 3 added, 3 newly tagged" in ended.out
    assert [layer["direction"] for layer in listed(type_in)] == ["F", "B", "W"]


def test_the_number_of_tagged_layers_is_that_of_the_distinct_ones(
    imported: Callable[..., Any], type_in: TypeIn
) -> None:
    lines = [f"{CONV} -F 1", f"{CONV} -F 1 -t 1", f"{CONV} -F 3", f"{CONV} -F 2"]
    assert "2 layers: 2 added, 2 newly tagged" in imported(*lines).out
    assert (
        len(rows(sa.select(models.ConfigTag.config_id).where(models.ConfigTag.tag == "net"))) == 2
    )
    assert "2 layers: 0 added, 0 newly tagged" in imported(*lines).out
    assert len(listed(type_in)) == 2


def test_defaults_reach_the_database_as_miopendriver_has_them(
    imported: Callable[..., Any], type_in: TypeIn
) -> None:
    assert imported("MIOpenDriver conv --spatial_dim 3 -F 1").code == 0
    (layer,) = listed(type_in)
    depth = {
        "in_d": 32,
        "fil_d": 3,
        "pad_d": 0,
        "conv_stride_d": 1,
        "dilation_d": 1,
        "batchsize": 100,
    }
    assert {name: layer[name] for name in depth} == depth


def test_the_save_flag_of_batch_norm_reaches_the_database(imported: Callable[..., Any]) -> None:
    assert imported(MIXED[2], MIXED[2].replace("-s 1", "-s 0")).code == 0
    table = models.BatchNormConfigRow
    found = rows(
        sa.select(table.save, table.run, table.mode, table.alpha, table.beta, table.direction)
    )
    assert sorted(map(tuple, found)) == [(0, 1, 1, 1.0, 0.0, "F"), (1, 1, 1, 1.0, 0.0, "F")]


def test_a_layer_is_the_same_after_its_row(imported: Callable[..., Any], type_in: TypeIn) -> None:
    assert imported(*MIXED).code == 0
    layers = [parse_line(line)[0] for line in MIXED]
    assert listed(type_in) == [json.loads(json.dumps(layer.to_json())) for layer in layers]
    assert [
        row.driver for row in rows(sa.select(models.ConfigRow.driver).order_by(models.ConfigRow.id))
    ] == [layer.driver() for layer in layers]
    for table, layer in zip(
        (
            models.ConvConfigRow,
            models.ConvConfigRow,
            models.BatchNormConfigRow,
            models.GemmConfigRow,
        ),
        layers,
        strict=True,
    ):
        columns = (
            sa.select(table.__table__)
            .join(models.ConfigRow)
            .where(models.ConfigRow.key == layer.key)
        )
        (row,) = rows(columns)
        values = row._asdict()
        del values["config_id"]
        assert {"kind": layer.kind, **values} == layer.to_json()


@pytest.mark.parametrize(
    ("steps", "stored"), [("", "build,measure"), ("build", "build"), ("measure,build", None)]
)
def test_no_step_means_every_step_and_their_order_is_the_librarys(
    loaded: TypeIn, steps: str, stored: str | None
) -> None:
    loaded("go_fish", "noop", "--init_session", "-l", "two")
    loaded("tuna", "applicability", "--session-id", 2, "-t", "small")
    ended = loaded("load_job", "--session_id", 2, "-t", "small", "--fin_steps", steps, "-l", "x")
    assert ended.out == "New jobs added: 20\n"
    found = {
        row.steps for row in rows(sa.select(models.Job.steps).where(models.Job.session_id == 2))
    }
    assert found == {stored or "build,measure"}


def test_no_solver_means_every_applicable_one(loaded: TypeIn) -> None:
    loaded("go_fish", "noop", "--init_session", "-l", "two")
    loaded("tuna", "applicability", "--session-id", 2, "-t", "small")
    for words in ((), ("-s", "")):
        loaded("load_job", "--session_id", 2, "-t", "small", "-l", "x", *words)
    found = rows(
        sa.select(sa.func.count(sa.distinct(models.Job.solver_id))).where(
            models.Job.session_id == 2
        )
    )
    assert found[0][0] == 10

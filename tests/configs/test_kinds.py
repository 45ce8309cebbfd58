"""Kinds and forms of lines that somebody brings: found, refused with a reason, and no danger to the
others."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import softmax_kind
from hypothesis import given
from hypothesis import strategies as st
from softmax_kind import Softmax

from tuna.configs import (
    KINDS,
    LINE_FORMS,
    Config,
    ConfigKind,
    LineForm,
    from_json,
    parse_line,
    parse_lines,
    read_line,
)
from tuna.configs.lines import read_one
from tuna.errors import BadInput, NotFound
from tuna.libraries import reference
from tuna.plugins import Plugins
from tuna.testing.kind_contract import registered

LINE = '{"kind": "softmax", "rows": 128, "cols": 1000}'


@pytest.fixture()
def softmax() -> Iterator[None]:
    with registered(softmax_kind.KIND):
        yield


@pytest.mark.usefixtures("softmax")
def test_a_json_line_stands_beside_driver_commands_and_find_db_keys() -> None:
    lines = [
        "MIOpenDriver gemm",
        LINE,
        "64-28-28-3x3-64-28-28-1-1x1-1x1-1x1-0-NCHW-FP32-F=x",
        LINE + " ",
    ]
    parsed = parse_lines(lines, "mixed")
    assert [config.kind for config in parsed.configs] == ["gemm", "softmax", "convolution"]
    assert (parsed.counts.accepted, parsed.counts.duplicates, parsed.weights) == (4, 1, (1, 2, 1))
    assert read_one(LINE) == Softmax(128, 1000)


def test_every_kind_is_read_from_a_json_line() -> None:
    for line in ("MIOpenDriver conv -F 1", "MIOpenDriver bnorm --forw 1", "MIOpenDriver gemmfp16"):
        (config,) = parse_line(line)
        assert read_line(config.json_text()) == [config]
        assert config.text() == config.driver()


@pytest.mark.usefixtures("softmax")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not a JSON object"),
        ("{} x", "not a JSON object"),
        ("{}", "needs a 'kind'"),
        (
            '{"kind": "relu"}',
            "unknown kind of config 'relu'; Tuna has attention, batch_norm, convolution, .*softmax",
        ),
        ('{"kind": "softmax", "rows": 1}', "a softmax config needs cols"),
        (
            '{"kind": "softmax", "rows": 1, "cols": 2, "x": 0, "axis": 1}',
            "a softmax config has no field axis, x",
        ),
        ('{"kind": "softmax", "rows": "1", "cols": 2}', "rows: Input should be a valid integer"),
        ('{"kind": "softmax", "rows": true, "cols": 2}', "rows: Input should be a valid integer"),
        ('{"kind": "softmax", "rows": NaN, "cols": 2}', "made of JSON values"),
        ('{"kind": "softmax", "rows": 0, "cols": 2}', "must be at least 1"),
        (
            '{"kind": "softmax", "rows": 1, "cols": 2, "data_type": "FP64"}',
            "data_type: Input should be 'FP32'",
        ),
        ("[" * 100_000, "no MIOpenDriver command"),
        ('{"kind": "gemm", "a":' + "[" * 100_000, "not a JSON object"),
    ],
)
def test_a_json_line_that_is_wrong_is_rejected_with_the_reason(line: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_line(line)
    (rejection,) = parse_lines([line], "x").rejections
    assert not rejection.unsupported


@pytest.mark.usefixtures("softmax")
@given(st.integers(1, 2**40), st.integers(1, 2**40))
def test_equal_layers_have_equal_keys_however_their_json_is_written(rows: int, cols: int) -> None:
    config = Softmax(rows, cols)
    fields = {"cols": cols, "data_type": "FP32", "kind": "softmax", "rows": rows}
    assert from_json(fields).key == config.key
    assert config.canonical() == json.dumps(config.to_json(), separators=(",", ":"))
    assert (Softmax(cols, rows).key == config.key) == (rows == cols)


@pytest.mark.usefixtures("softmax")
def test_a_kind_without_a_batch_size_cannot_be_given_another() -> None:
    (rejection,) = parse_lines([LINE], "x", batches=[2]).rejections
    assert rejection.reason == "a softmax has no batch size that another could replace"


def test_a_kind_is_there_only_while_it_is_registered_and_only_once() -> None:
    with pytest.raises(NotFound, match="unknown kind"):
        read_line(LINE)
    with registered(softmax_kind.KIND):
        assert read_line(LINE) == [Softmax(128, 1000)]
        with pytest.raises(BadInput, match="already"), registered(softmax_kind.KIND):
            pass
    with pytest.raises(NotFound, match="unknown kind"):
        read_line(LINE)


@dataclass(frozen=True)
class Pool(Config):
    """A kind with a driver command of its own, and no reference."""

    kind: ClassVar[str] = "pooling"
    window: int

    def driver(self) -> str:
        return f"./bin/MIOpenDriver pool -y {self.window}"

    @property
    def label(self) -> str:
        return f"pool {self.window}"

    @property
    def flops(self) -> int:
        return self.window**2


def test_a_kind_may_bring_a_driver_command() -> None:
    kind = ConfigKind(Pool, commands={"pool": lambda words: [Pool(int(words[2]))]})
    with registered(kind):
        assert read_line("./bin/MIOpenDriver pool -y 3") == [Pool(3)]
        assert Pool(3).text() == "./bin/MIOpenDriver pool -y 3"
        with pytest.raises(BadInput, match="a pooling config has no reference"):
            reference.make(Pool(3))
    assert parse_lines(["MIOpenDriver pool -y 3"], "x").counts.unsupported == 1


def test_a_reference_never_answers_another_question() -> None:
    (config,) = parse_line("MIOpenDriver conv -n 1 -c 4 -k 4 -H 6 -W 6 -F 1 -m trans")
    with pytest.raises(BadInput, match="only convolutions that are not transposed have"):
        reference.make(config)


def test_a_form_of_lines_is_asked_after_the_others() -> None:
    form = LineForm(
        "pool key",
        recognises=lambda line: line.startswith("pool:"),
        read=lambda line: [Pool(int(line[5:]))],
    )
    with LINE_FORMS.adding("pool", form):
        assert parse_lines(["pool:3", "pool:4"], "x").configs == (Pool(3), Pool(4))
        with pytest.raises(BadInput, match=r"find-db key.* pool key"):
            read_line("nonsense")


@pytest.mark.parametrize("config", [int, Config, type("Bare", (Config,), {"kind": "bare"})])
def test_what_is_no_kind_of_config_is_refused(config: type) -> None:
    with pytest.raises(TypeError):
        ConfigKind(config)


def test_a_plug_in_that_cannot_be_loaded_leaves_the_others_alone() -> None:
    plugins = Plugins("tuna.kinds", "kind of config", ConfigKind)
    points = {point.name: point for point in plugins._points.values()}
    points["broken"] = EntryPoint("broken", "no_such_package:KIND", "tuna.kinds")
    points["other"] = EntryPoint("other", "json:loads", "tuna.kinds")
    vars(plugins)["_points"] = points
    assert sorted(plugins.all()) == KINDS.names()
    assert plugins.get("gemm") is KINDS.get("gemm")
    for name, reason in (
        ("broken", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("other", "not a ConfigKind"),
    ):
        for _ in range(2):
            with pytest.raises(
                BadInput, match=f"the kind of config {name} cannot be loaded: .*{reason}"
            ):
                plugins.get(name)
    assert sorted(plugins.broken()) == ["broken", "other"]


def test_the_kind_in_the_documents_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kinds.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r'`(\{"kind".*?\})`', page)
    (tmp_path / "documented_kind.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with registered(importlib.import_module("documented_kind").KIND):
        config = read_one(line)
        assert (config.label, config.flops) == ("softmax 128x1000 fp32", 512_000)
        assert read_one(config.text()) == config

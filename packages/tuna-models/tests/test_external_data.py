"""Weights in files of their own, as exporters write them, travel with the model; places outside its
folder are refused."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import onnx
import pytest
from command_lines import Ended

from tuna.errors import BadInput, StorageFull
from tuna_models.api import benchmarks
from tuna_models.judging import checks
from tuna_models.reading import importer
from tuna_models.work import files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file, all weights of which are in `weights/net.data` beside it."""
    path = tmp_path / "export" / "net.onnx"
    (path.parent / "weights").mkdir(parents=True)
    onnx.save(
        nets.dense(),
        path,
        save_as_external_data=True,
        location="weights/net.data",
        size_threshold=0,
    )
    return path


def moved(path: Path, **fields: Any) -> None:
    """Change where the first weight lies."""
    found = onnx.load(str(path), load_external_data=False)
    tensor = found.graph.initializer[0]
    there = {entry.key: entry.value for entry in tensor.external_data} | {
        key: str(value) for key, value in fields.items()
    }
    del tensor.external_data[:]
    for key, value in there.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(found.SerializeToString())


def test_weights_without_space_are_said_in_a_sentence(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as a quota has it
    try:
        with pytest.raises(StorageFull, match=r"No space is left to write .*w/net\.data"):
            files.write(tmp_path / "w" / "net.data", bytes(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_other_weights_make_another_version(type_in: Callable[..., Ended], model: Path) -> None:
    type_in("tuna", "model", "import", "net", model)
    weights = model.parent / "weights" / "net.data"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    type_in("tuna", "model", "import", "net", model)
    listed = json.loads(type_in("tuna", "model", "list", "--json").out)
    assert len({one["version"] for one in listed}) == 2


@pytest.mark.parametrize("made", ["folder", "pipe", "device"])
@pytest.mark.parametrize("read", [files.read, benchmarks.read_library, checks.check_recorded])
def test_what_is_not_a_plain_file_is_not_waited_for(
    tmp_path: Path, read: Callable[[Path], object], made: str
) -> None:
    makers: dict[str, Callable[[Path], None]] = {
        "folder": Path.mkdir,
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
    }
    makers[made](tmp_path / "x.onnx")
    with pytest.raises(BadInput, match=f"x.onnx .* not a (plain file, but a {made}|file of NumPy)"):
        read(tmp_path / "x.onnx")


@pytest.mark.parametrize(
    "place",
    ["../secret", "weights/../../secret", "/etc/hostname", "", ".", "weights", "absent", "a\0b"],
)
def test_weights_outside_the_folder_or_in_no_plain_file_are_refused(
    model: Path, place: str
) -> None:
    (model.parent.parent / "secret").write_bytes(b"secret")
    with pytest.raises(BadInput, match=r"net\.onnx wants weights from") as refused:
        files.read_beside(model, place)
    assert "\n" not in str(refused.value)


def test_links_to_weights_are_not_followed(model: Path) -> None:
    weights = model.parent / "weights"
    (model.parent / "link").symlink_to(weights / "net.data")
    (model.parent / "folder").symlink_to(weights, target_is_directory=True)
    for place in ("link", "folder/net.data"):
        with pytest.raises(BadInput, match="which cannot be read: it is not a plain file"):
            files.read_beside(model, place)
    assert files.read_beside(model, "weights/net.data") == (weights / "net.data").read_bytes()


def test_a_place_that_a_model_makes_up_is_refused_by_the_command(
    type_in: Callable[..., Ended], model: Path
) -> None:
    moved(model, location="../secret")
    (model.parent.parent / "secret").write_bytes(bytes(4096))
    ended = type_in("tuna", "model", "import", "net", model)
    assert ended.code == BadInput.exit_code
    assert "net.onnx wants weights from '../secret', which is not in its folder." in ended.err


@pytest.mark.parametrize(
    "fields",
    [{"offset": 1 << 20}, {"length": 1 << 40}, {"offset": -1}, {"length": "many"}, {"length": 4}],
)
def test_weights_beyond_the_end_of_their_file_are_refused(
    model: Path, fields: dict[str, Any]
) -> None:
    moved(model, **fields)
    with pytest.raises(
        BadInput, match=r"net\.onnx (has a weight 'w0' that cannot be read|cannot be imported)"
    ):
        importer.to_relax(importer.read(model, {}), "net.onnx")

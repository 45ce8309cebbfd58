"""A model that is timed on this machine is foreign code, from the moment that it is loaded."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from box_place import HERE, SECRET
from command_lines import Ended
from settings_changes import change_setting
from shared_data import needed_program

from tuna.errors import BadInput

pytestmark = pytest.mark.usefixtures("needs_a_box", "forked_children")


def built(folder: Path, acts: Mapping[str, object]) -> Path:
    """A library that does these acts when it is loaded."""
    compiler = needed_program("cc")
    words = ", ".join(json.dumps(str(word)) for pair in acts.items() for word in pair)
    library = folder / "model.so"
    source = str(HERE / "box_model.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-DBOX_ACTS={words}", "-o", library, source], check=True
    )
    return library


def test_a_model_reaches_nothing_outside_of_its_box(
    type_in: Callable[..., Ended],
    home: Path,
    listener: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tvm")
    secret = home / "key"
    secret.write_text(SECRET)
    acts = {"read": secret, "write": secret, "list": home, "tcp": listener, "delete": secret}
    acts |= {"program": "/bin/true"}
    words = ("tuna", "benchmark-model", built(tmp_path, acts), "--local", "--input", "x=1:float32")
    ended = type_in(*words)
    assert (ended.code, "ended with exit code 17" in ended.err) == (BadInput.exit_code, True), ended
    assert secret.read_text() == SECRET
    change_setting(monkeypatch, "TUNA_SANDBOX", "off")
    assert "ended with exit code 18" in type_in(*words).err, "without a box it is seen to get out"

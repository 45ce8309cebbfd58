"""A refusal writes nothing: neither rows nor files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sqlalchemy as sa
from command_lines import Ended
from nets import Net

from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.models import Base
from tuna.errors import BadInput
from tuna_models.child_answers import WrittenAnswers
from tuna_models.process import ModelProcess
from tuna_models.work.session import ModelWork

pytestmark = pytest.mark.usefixtures("forked_children")
#: Files of processes that run, or ran: sockets, locks, logs, knowledge of the machine.
_OF_PROCESSES = ("run", "logs", "cache")


def written(home: Path) -> dict[str, object]:
    """Numbers of rows by table, and the files of TUNA_HOME but those of processes."""
    with reading(open_database()) as connection:
        rows = {
            name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for name, table in Base.metadata.tables.items()
        }
    inside = (path.relative_to(home) for path in home.rglob("*") if not path.is_dir())
    files = {str(path) for path in inside if path.parts[0] not in _OF_PROCESSES}
    return {**rows, "files": {name for name in files if not name.startswith("tuna.sqlite")}}


GOOD = "conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1\n"
FILES = {
    "good.txt": GOOD,
    "bad.txt": f"{GOOD}conv -n nonsense\n",
    "empty.txt": "",
    "page.onnx": "<html></html>",
    "kernel.py": "import os\n",
    "shapes.json": "[{}]",
    "db.ufdb.txt": "nonsense",
    "file": "",
}
COMMANDS = [
    "tuna tune bad.txt -t t --strict",
    "tuna tune empty.txt -t t",
    "tuna tune good.txt",
    "tuna tune good.txt -t t --library nosuch",
    "tuna tune good.txt -t t --condition caches=luke",
    "tuna tune good.txt -t t --option nosuch=1",
    "tuna tune good.txt -t t --log-to nosuch://x",
    "tuna tune good.txt -t t -o file",
    f"tuna tune good.txt -t {'t' * 129}",
    f"tuna tune good.txt -t t -l {'l' * 70_000}",
    "tuna tune kernel.py --shapes shapes.json",
    "tuna import bad.txt -t t --strict",
    "tuna import empty.txt -t t",
    f"tuna import good.txt -t {'t' * 129}",
    "tuna import net.onnx -t t",
    "tuna import kernel.py -t t --shapes shapes.json",
    "tuna import-db db.ufdb.txt",
    "tuna import-db good.txt --arch gfx90a --num-cu 104",
    "tuna capture -t t -- false",
    "tuna init-session tvm -l why --condition caches=luke",
    "tuna init-session tvm -l why --target nonsense",
    "tuna init-session nosuch -l why",
    "tuna session restore good.txt",
    "tuna load-jobs --session-id 99",
    "tuna golden build 1 --session-id 99",
    "go_fish miopen import_configs -f bad.txt -t t --strict",
    "go_fish miopen import_configs -f good.txt -t t -m net --md_version 1 -F onnx --fw_version 1",
    "go_fish miopen import_configs --add_model net",
    f"go_fish miopen import_configs --add_model {'n' * 129} --md_version 1",
    "load_job -t nosuch -l why --session_id 1",
    "tuna model import net page.onnx",
    "tuna model import n@me net.onnx",
    "tuna model import net net.onnx",
    "tuna model import net nosuch.onnx",
    "tuna model import net net.onnx --batch 3 --shape x=1",
    "tuna tune net.onnx",
    "tuna tune net.onnx -o nosuch/net.so",
    "tuna model build net -o net.so",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refusal_leaves_neither_rows_nor_files(
    command: str, home: Path, type_in: Callable[..., Ended]
) -> None:
    for name, content in FILES.items():
        Path(name).write_text(content)
    net = Net((1, 8))
    onnx.save(net.model(net.add("Mystery", "x", domain="own"), check=False), "net.onnx")
    before = written(home)
    ended = type_in(*command.split())
    assert ended.code != 0, ended.out
    assert written(home) == before, ended.err


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing computes a right answer of a model, which is refused for that."""
    call = ModelProcess.call

    def answering(process: ModelProcess, kind: Any, op: str, **arguments: Any) -> Any:
        if op == "answer":
            return WrittenAnswers(unanswered="ValueError: negative dimensions")
        return call(process, kind, op, **arguments)

    monkeypatch.setattr(ModelProcess, "call", answering)
    monkeypatch.setattr(ModelWork, "start_workers", lambda work: None)


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_file_that_the_check_refuses_leaves_what_was_there(
    imported_before: bool, home: Path, type_in: Callable[..., Ended], unanswered: None
) -> None:
    net = Net((1, 8))
    onnx.save(
        net.model(net.add("Softmax", net.add("MatMul", "x", net.constant(np.eye(8))))), "net.onnx"
    )
    if imported_before:
        assert type_in("tuna", "model", "import", "net", "net.onnx").code == 0
    before = written(home)
    ended = type_in("tuna", "tune", "net.onnx", "--minutes", 0, "-o", "net.so")
    assert "there is no right answer to compare with" in ended.err
    assert ended.code == BadInput.exit_code
    assert written(home) == before
    assert not Path("net.so").exists()

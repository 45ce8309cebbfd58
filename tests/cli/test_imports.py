"""A command imports what it needs, and the API's names lead to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuna import api

_SERVICES = ("celery", "kombu", "redis", "fsspec", "cryptography")
_NUMBERS = ("numpy", "tvm", "onnx", "torch", "xgboost")
#: Command lines in an order in which each imports more than those before it, and what is absent
#: after it.
_COMMANDS = {
    "--help": ("sqlalchemy", "pydantic", "rich", "tuna.settings"),
    "query --help": ("sqlalchemy", "pydantic"),
    "session set --help": ("tuna.db.database", "tuna.libraries.base"),
    "status": ("tuna.db.models", "tuna.configs", "tuna.reports.status", "jinja2"),
    "session list": ("tuna.libraries.base", "tuna.reports.status", "jinja2"),
    "query --limit 1": ("tuna.coordinator", "jinja2", "tuna.libraries.tvm"),
    "configs -t none": ("tuna.coordinator", "tuna.libraries.base", "jinja2"),
}
_PROGRAM = """
import contextlib, io, json, sys
from tuna.cli.main import guarded, tuna
for words, absent in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()):
        guarded(tuna, words.split())
    print(json.dumps([words, [name for name in absent if name in sys.modules]]))
"""


def test_a_command_imports_what_it_needs(tuna_home: Path) -> None:
    """All in one process: what one of them imports is there for the next."""
    absent = {words: (*names, *_SERVICES, *_NUMBERS) for words, names in _COMMANDS.items()}
    out = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(absent)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [json.loads(line) for line in out.splitlines()] == [[words, []] for words in _COMMANDS]


def test_each_name_of_the_api_leads_to_what_its_stub_imports() -> None:
    program = "from tuna import api; print(*(f'{n}={getattr(api, n)!r}' for n in api.__all__))"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert len(set(api.__all__)) == len(api.__all__)
    assert set(dir(api)) == set(api.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        api.nonsense  # noqa: B018

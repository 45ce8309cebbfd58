"""A command imports what it needs, and the API's names lead to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuna import api

_SERVICES = ("celery", "kombu", "redis", "fsspec", "cryptography")
_NUMBERS = ("numpy", "tvm", "onnx", "torch", "xgboost")
_PROGRAM = """
import io, sys, contextlib
from tuna.cli.main import guarded, tuna
with contextlib.redirect_stdout(io.StringIO()):
    code = guarded(tuna, sys.argv[2].split())
print(code, [name for name in sys.argv[1].split() if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("--help", ("sqlalchemy", "pydantic", "rich", "tuna.settings")),
        ("query --help", ("sqlalchemy", "pydantic")),
        ("session set --help", ("tuna.db.database", "tuna.libraries.base")),
        ("status", ("tuna.db.models", "tuna.configs", "tuna.reports.status", "jinja2")),
        ("session list", ("tuna.libraries.base", "tuna.reports.status", "jinja2")),
        ("query --limit 1", ("tuna.coordinator", "jinja2", "tuna.libraries.tvm")),
        ("configs -t none", ("tuna.coordinator", "tuna.libraries.base", "jinja2")),
    ],
)
def test_a_command_imports_what_it_needs(
    words: str, absent: tuple[str, ...], tuna_home: Path
) -> None:
    names = " ".join((*absent, *_SERVICES, *_NUMBERS))
    out = subprocess.run(
        [sys.executable, "-c", _PROGRAM, names, words], capture_output=True, text=True, check=True
    ).stdout
    assert out.endswith(" []\n"), out


def test_each_name_of_the_api_leads_to_what_its_stub_imports() -> None:
    program = "from tuna import api; print(*(f'{n}={getattr(api, n)!r}' for n in api.__all__))"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert len(set(api.__all__)) == len(api.__all__)
    assert set(dir(api)) == set(api.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        api.nonsense  # noqa: B018

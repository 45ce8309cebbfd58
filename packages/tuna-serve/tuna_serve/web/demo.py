"""The demo of the service: a session that was tuned elsewhere, in a TUNA_HOME of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files

from tuna import api
from tuna.api import get_settings


@contextmanager
def demo_home() -> Iterator[None]:
    """Have everything in here use a new TUNA_HOME with the session that the package brings, and a
    golden version of it; no setting of the user's holds, and it is removed at the end."""
    own = {name: value for name, value in os.environ.items() if name.startswith("TUNA_")}
    with tempfile.TemporaryDirectory(prefix="tuna-demo-") as folder:
        _use({"TUNA_HOME": folder})
        try:
            with as_file(files("tuna_serve.web") / "demo.tuna") as archive:
                session_id = api.restore_session(archive).session_id
            api.golden.build(1, session_id, None, allow_noisy=True)
            api.golden.promote(1, allow_noisy=True, by="the demo")
            yield
        finally:
            _use(own)


def _use(variables: dict[str, str]) -> None:
    for name in [one for one in os.environ if one.startswith("TUNA_")]:
        del os.environ[name]
    os.environ |= variables
    get_settings.cache_clear()

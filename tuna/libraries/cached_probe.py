"""Facts that a library's child found out about this machine, cached in TUNA_HOME: to ask again
takes seconds at each worker's start."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from tuna.common.files import atomic_file
from tuna.errors import TunaError
from tuna.settings import get_settings


def cached_probe(
    name: str, key: Sequence[str | int], find: Callable[[], Mapping[str, str]]
) -> Mapping[str, str]:
    """Return the cached answer of `find` for `key`, which holds all that the answer depends on;
    without one call `find` and cache its answer."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = get_settings().home / "cache" / "machine" / f"{name}-{digest}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # absent or damaged
        return {str(fact): str(value) for fact, value in json.loads(path.read_text()).items()}
    found = dict(find())
    with (
        contextlib.suppress(TunaError),
        atomic_file(path) as temporary,
    ):  # without a cache it is determined again next time
        temporary.write_text(json.dumps(found))
    return found

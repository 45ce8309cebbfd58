"""Helion's remote cache of best configs in a space of `tuna serve`.

HELION_AUTOTUNE_CACHE=RemoteAutotuneCache
HELION_REMOTE_CACHE_BACKEND=tuna_cache_client.helion.Backend
"""

from __future__ import annotations

from collections.abc import Iterable

from helion.autotuner.local_cache import parse_cache_entry
from helion.autotuner.remote_cache import RemoteCacheBackend

from tuna_cache_client.remote_space import remote_space

#: End of the names of best configs.
BEST_CONFIG = ".best_config"

#: Entries that `list` returns where Helion does not say how many.
_LISTED = 100


class Backend(RemoteCacheBackend):  # type: ignore[misc]
    """The best configs of a space, as JSON texts by Helion's key."""

    def get(self, key: str) -> str | None:
        """Return the text that is stored for a key; None if there is none, or none that Helion can
        parse: it does so where an exception ends the program."""
        name = key + BEST_CONFIG
        found = remote_space().get(key, [name])
        if name not in found:
            return None
        try:
            parse_cache_entry(text := found[name].decode())
        except Exception as error:  # its parser names no bound of what it raises
            remote_space().tell("a file cannot be parsed", f"{name}: {error}")
            return None
        return text

    def put(self, key: str, data: str) -> None:
        """Store a text; another one that is stored for the key stays."""
        remote_space().put(key, key + BEST_CONFIG, data.encode())

    def list(self, max_results: int | None = None) -> Iterable[str]:
        """Return the texts that were stored last, the newest first."""
        limit = _LISTED if max_results is None else max_results
        keys = remote_space().newest(BEST_CONFIG, limit)[:limit]
        return [text for key in keys if (text := self.get(key)) is not None]

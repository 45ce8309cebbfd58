"""Format of logs: text, or JSON objects as logstash takes them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from tuna.common.messages import inert


def configure(level: str, form: str, path: str | None = None) -> None:
    """Send every log of this process, structlog's and others', to stderr or to `path`."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.FileHandler(path, delay=True) if path else logging.StreamHandler(sys.stderr)
    # tracebacks first, so that their text is made inert too
    last: list[Any] = [structlog.processors.format_exc_info]
    if form == "json":
        last += [_as_logstash, structlog.processors.JSONRenderer()]
    else:
        # not rich's tracebacks, which show local variables and so passwords
        plain = structlog.dev.plain_traceback
        last += [
            _as_text,
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=plain),
        ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=False,
    )


@contextlib.contextmanager
def into_file(path: Path, level: str, form: str) -> Iterator[None]:
    """Send every log to a file until the block ends; the file is made with its first line."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    configure(level, form, str(path))
    try:
        yield
    finally:
        configure(level, form)


def _as_text(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Escape control characters of foreign texts, and indent their further lines.

    So no such text can look like a line of the log.
    """
    return {
        name: inert(value).replace("\n", "\n    ") if isinstance(value, str) else value
        for name, value in event.items()
    }


def _as_logstash(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """The names that logstash's own JSON encoder uses."""
    fixed = {
        "@timestamp": event.pop("timestamp"),
        "@version": "1",
        "message": event.pop("event"),
        "level": event.pop("level").upper(),
        "logger_name": event.pop("logger", ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    return fixed | event

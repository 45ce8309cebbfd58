"""Routes that answer what `tuna query`, `session`, `workers` and others say with `--json`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from tuna import api
from tuna.web.visitors import Reader

router = APIRouter(prefix="/v1")


@router.get("/sessions")
def sessions(_: Reader) -> Any:
    """Return all sessions, as `tuna status --json` does."""
    return api.status()

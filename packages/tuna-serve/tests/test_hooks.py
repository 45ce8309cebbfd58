"""What the core asks the service for: artifacts that its rows name, and figures of spaces."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tuna.db import access_tokens
from tuna.db.engine import reading, writing
from tuna.jobs import needed_artifacts
from tuna.reports.prometheus import Samples
from tuna_serve.db import cache_entries, requests
from tuna_serve.db.cache_entries import CacheBounds, EntryName
from tuna_serve.db.requests import StoredFile
from tuna_serve.hooks import METRICS

ENTRY, FILE, UPLOAD, OTHER = ("0" * 64, "1" * 64, "2" * 64, "3" * 64)


@pytest.fixture
def filled(engine: sa.Engine) -> sa.Engine:
    with writing(engine) as connection:
        access_tokens.add(connection, "a" * 12, "x", "submit", 60.0, space="team")
        bounds = CacheBounds(1 << 20, 1 << 20)
        cache_entries.put(connection, EntryName("team", "k", "f"), ENTRY, 5, "a" * 12, bounds)
        facts = {"kind": "layers", "name": "n", "wanted": "{}", "tag": "t", "digest": "d"}
        files = [StoredFile("f", FILE, 1)]
        bytes_ = {"upload_bytes": 1, "trials": 1, "priority": 1}
        more = {"token_id": "a" * 12, "upload": UPLOAD, "files": files, **bytes_}
        requests.add(connection, **facts, **more)
    return engine


def test_what_requests_and_entries_name_is_in_use(filled: sa.Engine) -> None:
    with reading(filled) as connection:
        found = needed_artifacts.in_use(connection, {ENTRY, FILE, UPLOAD, OTHER})
    assert found == {ENTRY, FILE, UPLOAD}


def test_figures_of_spaces_are_metrics(filled: sa.Engine) -> None:
    samples = Samples()
    with reading(filled) as connection:
        METRICS.read(connection, samples)
    assert samples.values == {
        "tuna_cache_files": {("team",): 1},
        "tuna_cache_bytes": {("team",): 5},
        "tuna_cache_refused_total": {("team",): 0},
    }

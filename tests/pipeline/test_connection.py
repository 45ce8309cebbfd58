"""Connections follow the settings of the moment: a process may open one home after another."""

from __future__ import annotations

from pathlib import Path

from tuna.embedded_redis import EmbeddedRedis
from tuna.pipeline.connection import connect, make_celery, queue_depth
from tuna.settings import Settings


def test_each_home_has_its_own_broker(tmp_path: Path) -> None:
    """A coordinator kept the broker of the first home that its process had opened, which was gone."""
    for name in ("one", "other"):
        settings = Settings(home=tmp_path / name)
        server = EmbeddedRedis(settings.run_dir)
        server.acquire()
        try:
            app = make_celery(settings)
            with app.producer_or_acquire() as producer:
                app.send_task("tuna.run_chunk", queue="q", producer=producer, ignore_result=True)
            with app.connection_for_read() as connection:
                assert queue_depth(connection, "q") == 1
            assert connect(settings).llen("q") == 1
        finally:
            server.release()

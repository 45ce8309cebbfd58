"""`tuna cancel` ends what a worker runs, whatever its host is called: fin, and all that fin
started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from command_lines import Ended
from jobs_builder import claim

from tuna.artifacts.store import Artifacts
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.context import RunContext
from tuna.libraries.registry import get_library
from tuna.queue.connection import connect, ensure_services
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.settings import get_settings
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

STEP = "miopen_find_compile"
#: A quarter of it passes between two heartbeats, unless they are told to come more often.
LEASE_S = 240.0
#: A worker is told within 1 s and kills within half a second; the rest is for a busy machine.
END_S = 60.0


def _runs(process: psutil.Process) -> bool:
    """Whether it is there; one whose parent has ended stays a zombie for as long as the machine's
    first process likes."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.service
def test_a_call_of_fin_that_takes_ten_minutes(
    home: Path,
    tmp_path: Path,
    rocm: Callable[..., Path],
    type_in: Callable[..., Ended],
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelling ends fin at once, which may run for an hour."""
    monkeypatch.setenv("TUNA_SANDBOX", "off")  # in the box nothing leaves its process group
    get_settings.cache_clear()
    fin = rocm(options={"sleep_s": 600}) / "bin" / "fin"
    (tmp_path / "layers.txt").write_text(
        "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -F 1\n"
    )
    for line in (
        "init-session miopen -l test",
        "import layers.txt -t t",
        "update-solvers miopen",
        "applicability --session-id 1",
        f"load-jobs --session-id 1 -t t -l test --steps {STEP}",
    ):
        assert type_in("tuna", *line.split()).code == 0
    started = [tmp_path / "fin.pid", tmp_path / "grandchild.pid"]
    grandchild = f"setsid sh -c 'echo $$ > {started[1]}; exec sleep 600' &\n"
    fin.write_text(
        fin.read_text().replace("exec ", f"echo $$ > {started[0]}\n{grandchild}exec ", 1)
    )
    ensure_services(get_settings())
    engine, library, client = open_database(), get_library("miopen"), connect(get_settings())
    (claimed,) = claim(engine, 1, STEP, 1, library=library)
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    leases = Leases(client, namespace, LEASE_S)
    leases.open([claimed.id])
    facts = {
        "library": "miopen",
        "step": STEP,
        "environment": "",
        "toolchain": toolchain_of(library),
    }
    chunk = Chunk(id=claimed.id, namespace=namespace, items=claimed.items, **facts)
    context = RunContext(Artifacts((tmp_path / "a").as_uri(), tmp_path / "c"), tmp_path, (0,))
    runner, ended = Runner(RedisLink(client, LEASE_S), context, "far-away"), list[str]()
    worker = threading.Thread(target=lambda: ended.append(runner.run(chunk, library)))
    worker.start()
    eventually(
        lambda: all(path.exists() and path.read_text().endswith("\n") for path in started), 30
    )
    running = [psutil.Process(int(path.read_text())) for path in started]
    assert all(map(_runs, running))
    assert type_in("tuna", "cancel", "--session-id", "1").code == 0
    eventually(lambda: not any(map(_runs, running)), END_S)
    worker.join(60)
    assert ended == ["lost"]

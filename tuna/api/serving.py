"""Workers of this machine: join a coordinator by token, and run, also for boards behind TVM's
RPC."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass

from tuna.api.workers import Role
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput, ServiceError
from tuna.gateway import remote_link
from tuna.gateway.protocol import MAX_PROCESSES
from tuna.gateway.tokens import JoinToken
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.boards import BoardPool
from tuna.queue.served_queues import ServedQueues, Unavailable
from tuna.sandbox import discovery
from tuna.settings import get_settings
from tuna.workers.compatibility import session_text
from tuna.workers.serve import check_options, serve


@dataclass(frozen=True)
class WorkerBoards:
    """The boards behind TVM's RPC that an eval worker measures on; what is empty is as the settings
    say."""

    tracker: str = ""  #: HOST:PORT
    device_key: str = ""
    target: str = ""
    reset: str = ""  #: command line that may bring a lost one back


def join(
    role: Role,
    line: str,
    processes: int = 1,
    *,
    devices: str | None = None,
    boards: WorkerBoards | None = None,
) -> None:
    """Become a remote worker with the token of `line`; its settings go into this process's
    environment, for its workers.

    `processes`, `devices`, `boards`: as for `serve_workers`; what it would refuse is refused before
    the token is spent.
    """
    token = JoinToken.parse(line)
    variables = _of_boards(role, boards, "") if boards else {}
    check_options(role, processes, devices, bool(boards))
    if devices is not None:
        processes = len(discovery.choose(discovery.discover(), devices))
    os.environ.update(variables)  # what is measured is the board's, not this machine's
    get_settings.cache_clear()
    served = ServedQueues()
    found = served.under(role)
    queues = [queue for queue in found.values() if isinstance(queue, str)]
    if boards and not queues:
        reasons = " ".join(one.reason for one in found.values() if isinstance(one, Unavailable))
        raise ServiceError(f"This worker has no board to join with. {reasons}")
    names = tuple(queue.partition(".")[2] for queue in queues)
    facts = remote_link.facts_of(
        {
            "host": socket.gethostname(),
            "device": served.device_name(queues),
            "environments": names if role == "eval" else (),
            "toolchains": names if role == "compile" else (),
            "processes": min(processes, MAX_PROCESSES),
        }
    )
    credentials = remote_link.join(token, role, facts)
    os.environ["TUNA_GATEWAY"] = credentials.text()
    os.environ["TUNA_WORKER_NAME"] = credentials.name
    get_settings.cache_clear()


def serve_workers(
    role: Role,
    processes: int = 1,
    *,
    devices: str | None = None,
    session_id: int | None = None,
    once: bool = False,
    boards: WorkerBoards | None = None,
) -> int:
    """Run workers in the foreground until they have ended; returns the exit code. Needs the main
    thread.

    `devices`: `all`, or numbers such as `0,2`, one eval worker for each; `session_id`: the only
    session to work for; `once`: leave when the queues are empty; `boards`: measure on these.
    """
    session = "" if session_id is None else _session_text(session_id)
    variables = _of_boards(role, boards, session) if boards else {}
    return serve(role, processes, devices=devices, session=session, once=once, variables=variables)


def _of_boards(role: Role, boards: WorkerBoards, session: str) -> dict[str, str]:
    """The settings of a worker that measures on boards; raises BadInput, LibraryMissing."""
    if role != "eval":
        raise BadInput(
            "Only eval workers measure on boards.",
            hint="leave out --tvm-tracker: any worker compiles for them",
        )
    settings = get_settings()
    tracker, key = (
        boards.tracker or settings.tvm_tracker,
        boards.device_key or settings.tvm_device_key,
    )
    target = boards.target or (
        json.loads(session)["environment"]["target"] if session else settings.tvm_target
    )
    toolchain.tvm_version()  # refused here, for a worker that ends is started again
    BoardPool.at(tracker, key)
    if target:
        toolchain.parse(target)
    found = {"TUNA_TVM_TRACKER": tracker, "TUNA_TVM_DEVICE_KEY": key, "TUNA_TVM_TARGET": target}
    return {**found, **({"TUNA_TVM_RESET": boards.reset} if boards.reset else {})}


def _session_text(session_id: int) -> str:
    with reading(open_database()) as connection:
        return session_text(session_id, sessions.get(connection, session_id).environment)

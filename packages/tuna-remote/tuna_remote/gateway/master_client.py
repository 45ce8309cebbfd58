"""`tuna rpc-client`: joins a master with a token, and runs this machine's workers until a signal
comes.

It has one worker of each role: one compiles, one measures, on this machine or on a board behind a
TVM tracker of it. Each has credentials of its own, in its environment alone.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuna.api import Settings
from tuna.common.lifetime import SESSION, TELL
from tuna.errors import BadInput, ServiceError
from tuna.libraries.base import Environment
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.boards import Tracker
from tuna.sandbox.cores import compile_cpus
from tuna.workers.launch import WorkerSpec
from tuna.workers.serve import Supervisor
from tuna.workers.served_queues import session_text
from tuna_remote import boards
from tuna_remote.gateway import https_client
from tuna_remote.gateway.protocol import MAX_PROCESSES
from tuna_remote.gateway.tokens import Credentials, JoinToken

_CONNECT_S = 5.0
#: Bound of the workers' warm shutdown, and of the cold one after it: the client ends within 5 s.
_SHUTDOWN_S, _MARGIN_S = 1.0, 2.5


@dataclass(frozen=True)
class MeasuringPlace:
    """Where a client measures: a board with the key `device` at the tracker, or this machine."""

    target: Mapping[str, object]
    tracker: Tracker | None = None
    device: str = ""

    @classmethod
    def parse(cls, target: str, device: str | None, port: int | None) -> MeasuringPlace:
        """Parse the options of `tuna rpc-client`; raises BadInput."""
        parsed = toolchain.parse(target)
        if (device is None) != (port is None):
            raise BadInput(
                "A board is named by its key and by the port of its tracker, which runs on this"
                " machine.",
                hint=(
                    "give both --device and --runner-port, or none of them to measure on this"
                    " machine"
                ),
            )
        if device is None or port is None:
            if toolchain.is_foreign(parsed):
                text = f"This machine cannot measure for {toolchain.triple(parsed)}."
                raise BadInput(text, hint="name a board that can with --device and --runner-port")
            return cls(parsed)
        return cls(parsed, Tracker.parse(f"127.0.0.1:{port}"), device)

    def __str__(self) -> str:
        return (
            "LocalRunner" if self.tracker is None else f"RPCRunner: {self.tracker} - {self.device}"
        )

    def places(self) -> Iterator[tuple[Environment, dict[str, str]]]:
        """The environments that it can measure in, each with the settings of such a worker.

        A master has a session of either kind: its machine's own, or that of a target alone. The
        likelier one is the first. Raises LibraryMissing where TVM is missing, or a compiler that
        links for the target, or the board.
        """
        toolchain.check(self.target)
        text = toolchain.to_text(self.target)
        if self.tracker is not None:
            pool = boards.BoardPool(self.tracker, self.device)
            own = boards.environment_of(boards.ask(pool), self.target, self.device)
            variables = {
                "TUNA_TVM_TRACKER": str(self.tracker),
                "TUNA_TVM_DEVICE_KEY": self.device,
                "TUNA_TVM_TARGET": text,
            }
        else:
            own, variables = toolchain.host_environment(), {"TUNA_TVM_TRACKER": ""}
        alone = {**variables, "TUNA_TVM_TARGET": text, "TUNA_TVM_TARGET_ALONE": "1"}
        of_target = toolchain.target_environment(text), alone
        if self.tracker is not None:
            yield from (of_target, (own, variables))
        elif toolchain.is_own(self.target, json.loads(own.target)):
            yield from ((own, variables), of_target)
        else:
            yield of_target


class MasterClient:
    """A client of the master at `server` (HOST:PORT); `say` gets its log lines."""

    def __init__(
        self, server: str, place: MeasuringPlace, settings: Settings, say: Callable[[str], None]
    ) -> None:
        self._server = Tracker.parse(server)
        self._place = place
        self._settings = settings
        self._say = say

    def connect(self) -> None:
        """Raise ServiceError unless something listens there."""
        self._say(f"RPCClient: Connecting to server {self._server}")
        try:
            socket.create_connection((self._server.host, self._server.port), _CONNECT_S).close()
        except OSError as error:
            raise ServiceError(
                f"No master answers at {self._server}: {error.strerror or error}.",
                hint="start it there: `tuna tune-rpc`, with --listen for clients on other machines",
            ) from None
        self._say(f"RPCClient: {self._server} connected")

    def join(self, line: str) -> list[WorkerSpec]:
        """Return the workers to start, which have joined with the two tokens of `line`.

        Raises BadInput for a target that no session is for.
        """
        compiles, measures = (
            token.at(f"https://{self._server}") for token in JoinToken.parse_client(line)
        )
        environment, variables, granted = self._admitted(measures)
        processes = min(len(compile_cpus()), MAX_PROCESSES)
        facts = https_client.facts_of(toolchains=(environment.toolchain,), processes=processes)
        of_compiler = _variables(https_client.join(compiles, "compile", facts))
        self._say(f"RPCClient: Register token {compiles.id},{measures.id}")
        self._say(f"RPCClient: {self._place}")
        common = {SESSION: session_text(0, environment), "TUNA_SHUTDOWN_S": str(_SHUTDOWN_S)}
        return [
            WorkerSpec("compile", processes, env={**common, **of_compiler}),
            WorkerSpec(
                "eval",
                env={**common, **variables, **granted, TELL: "1"},
                waits=self._place.tracker is not None,
            ),
        ]

    def serve(self, specs: Sequence[WorkerSpec]) -> int:
        """Run the workers until they have ended; returns the exit code. Call it in the main
        thread."""
        self._say("RPCClient: Requesting a job for tuning")
        settings = self._settings.model_copy(update={"shutdown_s": _SHUTDOWN_S})
        return Supervisor(specs, settings, _MARGIN_S).run()

    def _admitted(self, token: JoinToken) -> tuple[Environment, dict[str, str], dict[str, str]]:
        """The environment that a session is for, the settings to measure in it, and the credentials
        of the worker that does."""
        for found, variables in self._place.places():
            keys = (found.machine_key,)
            facts = https_client.facts_of(device=found.device, environments=keys)
            with contextlib.suppress(https_client.NoSession):
                return found, variables, _variables(https_client.join(token, "eval", facts))
        raise BadInput(
            f"The master at {self._server} has no session for the target"
            f" {toolchain.to_text(self._place.target)} and {toolchain.toolchain_of()}.",
            hint=(
                "give the master's target, and install the same version of Tuna and of TVM; a"
                " master whose target leaves the CPU open, such as llvm, is for machines like its"
                " own: name the CPU there to tune for others"
            ),
        )


def _variables(credentials: Credentials) -> dict[str, str]:
    return {"TUNA_GATEWAY": credentials.text(), "TUNA_WORKER_NAME": credentials.name}

"""The objects behind our entry points; the modules that they need are imported when called."""

from __future__ import annotations

from typing import Literal

from tuna.libraries.boards import WorkerBoards
from tuna.workers.joining import Joining, Role


class GatewayJoining(Joining):
    """Workers join a gateway over HTTPS."""

    node = "tuna_remote.gateway.node"

    def create_token(
        self, role: Literal["compile", "eval", "client"], ttl_s: float, url: str | None = None
    ) -> str:
        """Make a token for a gateway of this database; `url`: default: that of this TUNA_HOME."""
        from tuna_remote import joining

        if role == "client":
            return joining.create_client_token(ttl_s, url)
        return joining.create_token(role, ttl_s, url)

    def join(
        self,
        role: Role,
        line: str,
        processes: int = 1,
        *,
        devices: str | None = None,
        boards: WorkerBoards | None = None,
    ) -> None:
        """Join the gateway that the line names."""
        from tuna_remote import joining

        joining.join(role, line, processes, devices=devices, boards=boards)


JOINING = GatewayJoining()

"""PyMySQL connections that say when their server is silent, and give it up when it answers nobody.

PyMySQL waits for an answer without a limit, or up to one that would end long statements too. Here a
silence is followed by a login on a connection of its own: a server that takes it is at work on the
statement, one that does not has been stopped, or the network swallows what is sent.
"""

from __future__ import annotations

import contextlib
import io
import socket
import time
from typing import TYPE_CHECKING, Any

import pymysql
import pymysql.cursors
import structlog
from pymysql.constants import CR

from tuna.common import waits

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = structlog.get_logger(__name__)

#: Seconds of silence after which a connection attempt is given up and another login looks for a
#: running statement; it looks again when the silence is twice as long
SILENCE_S = 4.0
_WRITE_S = 60.0
#: Numbers of the client's own errors (errmsg.h), such as "cannot connect"
_OWN_CODES = range(2000, 3000)


if TYPE_CHECKING:
    _Connection = pymysql.connections.Connection[pymysql.cursors.Cursor]
else:
    _Connection = pymysql.connections.Connection


class WatchedConnection(_Connection):
    """A connection whose reads notice a silent server: they raise TimeoutError, which PyMySQL
    reports as a lost connection, once the server takes no login either."""

    def __init__(self, **options: Any) -> None:
        self._login = {
            name: value for name, value in options.items() if name not in ("init_command", "db")
        }
        self._connected = False
        self._buffer: io.BufferedReader | None = None
        waits = {"connect_timeout": SILENCE_S, "read_timeout": SILENCE_S, "write_timeout": _WRITE_S}
        super().__init__(**{**waits, **options})

    def connect(self, sock: socket.socket | None = None) -> None:
        """Connect and log in; raises OperationalError, also for a server that stays silent and for
        a way to log in that needs a package."""
        self._connected = False
        try:
            super().connect(sock)
        except RuntimeError as error:  # of ed25519 passwords without PyNaCl
            raise pymysql.OperationalError(CR.CR_AUTH_PLUGIN_CANNOT_LOAD, str(error)) from error
        self._connected = True

    @property
    def _rfile(self) -> io.BufferedReader | None:
        """The file that PyMySQL reads answers from; it sets its socket's, with TLS another."""
        return self._buffer

    @_rfile.setter
    def _rfile(self, file: io.BufferedReader | None) -> None:
        self._buffer = None
        if file is not None:
            file.close()
            self._buffer = io.BufferedReader(_Watched(vars(self)["_sock"], self))

    def silent(self, since_s: float) -> None:
        """Tell of a silence; raises TimeoutError if the server takes no login."""
        where = str(self.unix_socket or f"{self.host}:{self.port}")
        if not self._connected:
            raise TimeoutError(f"no answer for {since_s:.0f} s")
        log.warning("waiting for the database", server=where, silent_s=round(since_s))
        waits.tell(f"the database at {where}, silent for {since_s:.0f} s")
        if not self._takes_login():
            raise TimeoutError(f"no answer for {since_s:.0f} s, nor to another connection")

    def _takes_login(self) -> bool:
        options = {**self._login, "connect_timeout": SILENCE_S, "read_timeout": SILENCE_S}
        try:
            with contextlib.closing(pymysql.connect(**options)):
                return True
        except pymysql.MySQLError as error:  # the server's own refusal is an answer, too
            return _code(error) not in _OWN_CODES


def _code(error: pymysql.MySQLError) -> int:
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


class _Watched(io.RawIOBase):
    """The bytes that a socket receives."""

    def __init__(self, sock: socket.socket, connection: WatchedConnection) -> None:
        self._socket, self._connection = sock, connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        since, asked_s = time.monotonic(), 0.0
        while True:
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:  # of `read_timeout`
                silent_s = time.monotonic() - since
                if silent_s >= 2 * asked_s:
                    self._connection.silent(silent_s)
                    asked_s = silent_s

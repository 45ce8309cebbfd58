"""Errors for users: each is one sentence with an exit code and a hint on what to do next."""

from __future__ import annotations


class TunaError(Exception):
    """An operation failed for a reason that the user can act on."""

    exit_code = 1
    hint = ""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        if hint:
            self.hint = hint


class BadInput(TunaError):
    """The input is not usable; nothing was written."""

    exit_code = 2


class NotFound(BadInput):
    """A session, tag, solver, step, library or another thing that was named does not exist."""

    exit_code = 3


class DatabaseError(TunaError):
    """The database cannot be used."""

    exit_code = 4


class SchemaError(DatabaseError):
    """The database has a schema that this version of Tuna cannot use."""


class ServiceError(TunaError):
    """A service that Tuna needs (Redis, the broker, the artifact store) cannot be used."""

    exit_code = 5


class LibraryMissing(TunaError):
    """The library to tune is not installed on this machine."""

    exit_code = 6


class StoreUnavailable(ServiceError):
    """The artifact store is unreachable, or is not the one that a coordinator prepared."""


class StorageFull(TunaError):
    """No space is left where Tuna has to write."""

    exit_code = 8
    hint = "free some space and run it again"

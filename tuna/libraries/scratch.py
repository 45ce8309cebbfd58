"""Artifacts and folders of the children of a `CandidateLibrary`."""

from __future__ import annotations

from pathlib import Path

from tuna.libraries.context import RunContext


class ArtifactLost(Exception):
    """An artifact, by its digest, is gone from the store or damaged."""


def artifact(digest: str, context: RunContext) -> bytes:
    """The bytes of an artifact; raises ArtifactLost."""
    try:
        return context.artifacts.get(digest)
    except KeyError:
        raise ArtifactLost(digest) from None


def body(digest: str, context: RunContext) -> Path:
    """A file with a config's body, for the children; raises ArtifactLost."""
    path = context.scratch / f"{digest}.body"
    if not path.exists():
        path.write_bytes(artifact(digest, context))
    return path


def room(context: RunContext, name: str) -> Path:
    """The folder that a child may write to; what is to be measured lies beside it, where it may
    only read."""
    folder = lasting(context) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lasting(context: RunContext) -> Path:
    return context.lasting or context.scratch

"""Answers of requests: what is known already, the files of an answer, and the end of a request."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tuna.api.documents import json_text
from tuna.api.rows import open_database, reading, sessions, writing
from tuna.api.services import artifacts_of_models
from tuna.configs import Config, ParsedFile, parse_lines
from tuna.errors import BadInput, NotFound
from tuna.libraries.base import Environment
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import StoredFile, TuningRequest
from tuna_serve.requests import known
from tuna_serve.requests.asked import MAX_LAYERS, Asked
from tuna_serve.requests.known import ExactResult
from tuna_serve.requests.uploads import folder, forget, uploaded_before
from tuna_serve.requests.watch import current

#: Numbers of a built model, which hold for whoever gets it.
FACTS = (
    *("layers", "exact", "complete", "time_ms", "untuned_ms", "in_turn_ms", "errors", "device"),
)
#: Lines of a file of layers, which are read in the service's own process.
_MAX_LINES = 4 * MAX_LAYERS


@dataclass(frozen=True)
class RequestAnswer:
    """The end of a request."""

    state: RequestState
    #: Content, or path, of each file by its name.
    documents: Mapping[str, bytes | Path]
    message: str = ""  #: sentence on what was not reached; empty: all was


def finish(request: TuningRequest, answer: RequestAnswer, **progress: Any) -> None:
    """Store the files of an answer and end the request, unless it was canceled meanwhile."""
    artifacts, files = artifacts_of_models(), []
    for name, content in answer.documents.items():
        with contextlib.ExitStack() as stack:
            file: IO[bytes] = (
                io.BytesIO(content)
                if isinstance(content, bytes)
                else stack.enter_context(content.open("rb"))
            )
            size_bytes = file.seek(0, io.SEEK_END)
            files.append(StoredFile(name, artifacts.put_file(file), size_bytes))
    ended = {"message": answer.message, "progress": {**request.progress, **progress}}
    with writing(open_database()) as connection:
        requests.move(connection, request.id, answer.state, files=files, **ended)
    forget(request.upload, *(file.digest for file in files))


def environment_of(request: TuningRequest) -> Environment:
    """Return the environment of a request; raises BadInput if its session was deleted."""
    if request.session_id is None:
        raise BadInput("The session of this request was deleted.", hint="submit it again")
    with reading(open_database()) as connection:
        return sessions.get(connection, request.session_id).environment


def read_layers(file: IO[bytes]) -> ParsedFile:
    """Return the layers of a file, each of which is a driver command, JSON or a line of a log.

    Raises BadInput for none, or too many, and for a line that names none.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
    lines = (text.readline(1 << 20) for _ in range(_MAX_LINES))
    try:
        parsed = parse_lines(itertools.takewhile(bool, lines), "layers")
        if text.read(1):
            raise BadInput(f"The file of layers has more than {_MAX_LINES} lines.")
    finally:
        text.detach()
    parsed.check_strict()
    if not 1 <= len(parsed.configs) <= MAX_LAYERS:
        raise BadInput(
            f"A request has 1 to {MAX_LAYERS} layers, not {len(parsed.configs)}.",
            hint="a line for each: a MIOpenDriver command or a JSON object",
        )
    return parsed


def stored_layers(request: TuningRequest) -> ParsedFile:
    """Return the layers of a request; raises BadInput if its file is gone."""
    with uploaded_before():
        content = artifacts_of_models().get(request.upload)
    return read_layers(io.BytesIO(content))


def documents_of_layers(
    request: TuningRequest,
    arch: str,
    layers: Mapping[int, tuple[Config, int]],
    found: Mapping[int, ExactResult],
) -> dict[str, bytes]:
    """Return the files of an answer about layers: their results, and the coverage by them."""
    coverage = known.coverage_of(request.name, arch, layers, found)
    results = [found[key] for key in layers if key in found]
    return {
        "results.json": json_text(results, indent=1).encode(),
        "coverage.json": json_text(coverage, indent=1).encode(),
    }


def answer_at_once(request_id: int) -> TuningRequest:
    """Answer a request that was just accepted if that takes no trial and no build; return it as it
    is then."""
    request = current(request_id)
    answer_layers(request) if request.kind == "layers" else _answer_model(request)
    return current(request_id)


def answer_layers(request: TuningRequest) -> bool:
    """End a request if each of its layers has a result that is as fast as it asks for; False if
    not."""
    parsed, environment = stored_layers(request), environment_of(request)
    target_ms = Asked.model_validate(request.wanted).target_ms
    with reading(open_database()) as connection:
        ids = known.stored_ids(connection, parsed.configs)
        if len(ids) < len(parsed.configs):
            return False
        found = known.exact(connection, environment, list(ids.values()))
    if len(found) < len(ids) or not all(one.meets(target_ms) for one in found.values()):
        return False
    pairs = zip(parsed.configs, parsed.weights, strict=True)
    layers = {ids[layer.key]: (layer, weight) for layer, weight in pairs}
    documents = documents_of_layers(request, environment.arch, layers, found)
    answer = RequestAnswer(RequestState.KNOWN, documents)
    finish(request, answer, layers=len(layers), known=len(layers), trials=0)
    return True


def _answer_model(request: TuningRequest) -> None:
    """End a request with the files of an earlier one for the same model in the same environment,
    if it was as fast as this asks for, or all its tasks had results then."""
    asked = Asked.model_validate(request.wanted)
    with reading(open_database()) as connection:
        earlier = requests.answers(connection, "model", request.upload, request.session_id or 0)
    for one in earlier:
        before = Asked.model_validate(one.wanted)
        fields = ("name", "batch", "shapes", "untuned")
        same = all(getattr(before, name) == getattr(asked, name) for name in fields)
        if asked.target_ms is None:
            suffices = one.progress.get("complete")
        else:
            suffices = one.progress.get("time_ms", math.inf) <= asked.target_ms
        if same and suffices:
            facts = {name: one.progress[name] for name in FACTS if name in one.progress}
            facts |= {"as_of": one.id, "known": facts["exact"], "trials": 0}
            answer = {"tag": one.tag, "files": one.files, "progress": facts}
            with writing(open_database()) as connection:
                requests.move(connection, request.id, RequestState.KNOWN, **answer)
            return


@contextlib.contextmanager
def opened(request: TuningRequest, name: str | None = None) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content of one file of an answer, or of an archive of all.

    Raises NotFound if the request has no answer, or no such file.
    """
    files = [file for file in request.files if name in (None, file.name)]
    if not files:
        there = ", ".join(file.name for file in request.files)
        raise NotFound(
            f"Request {request.id}, which is {request.state}, has no such file.",
            hint=f"files: {there or 'none yet'}",
        )
    artifacts = artifacts_of_models()
    with tempfile.TemporaryFile(dir=folder()) as whole:
        try:
            if name is not None:
                artifacts.copy(files[0].digest, whole)
            else:
                with zipfile.ZipFile(whole, "w") as archive:
                    for file in files:
                        with archive.open(file.name, "w", force_zip64=True) as member:
                            artifacts.copy(file.digest, member)
        except KeyError:
            raise NotFound(
                f"The files of request {request.id} are gone from the artifact store.",
                hint="submit it again under another key: what was tuned is still known",
            ) from None
        whole.seek(0)
        yield (name or f"request-{request.id}.zip"), whole

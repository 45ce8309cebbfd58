"""The requests that MITuna's own tests expect of it, as far as they are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuna.artifacts.store import Artifacts
from tuna.configs import parse_line
from tuna.libraries.context import RunContext
from tuna.libraries.items import Candidate, CodeObject, WorkItem
from tuna.libraries.miopen import fin, fin_protocol, kernel_objects
from tuna.libraries.miopen.library import MiopenLibrary
from tuna.libraries.steps import find_step
from tuna.vocabulary import queue_name

LINES = (
    "MIOpenDriver conv -n 16 -c 64 -H 28 -W 30 -k 128 -y 3 -x 5 -F 1",
    "MIOpenDriver conv -n 16 -c 64 -H 28 -W 30 -k 128 -y 3 -x 5 -F 2 --in_layout NHWC",
    "MIOpenDriver conv -n 16 -c 64 -H 28 -W 30 -k 128 -y 3 -x 5 -F 4 -g 4",
    "MIOpenDriver bnorm --forw 1",
    "MIOpenDriver bnorm --forw 2",
    "MIOpenDriver bnorm --forw 0 --back 1",
)


def test_a_request_for_applicability_has_an_id_and_a_direction_for_each() -> None:
    jobs = fin_protocol.applicability([parse_line(line)[0] for line in LINES], "gfx908", 120)  # type: ignore[misc]
    assert [job["config_tuna_id"] for job in jobs] == [0, 1, 2, 3, 4, 5]
    assert [job["direction"] for job in jobs] == [1, 2, 4, 1, 2, 4]
    assert {(job["arch"], job["num_cu"], *job["steps"]) for job in jobs} == {
        ("gfx908", 120, "applicability")
    }


@pytest.mark.parametrize(("line", "layout"), [(LINES[0], "NCHW"), (LINES[1], "NHWC")])
def test_the_tensors_of_a_layer_are_named_alike_in_every_layout(line: str, layout: str) -> None:
    fields = fin_protocol.config_fields(parse_line(line)[0])  # type: ignore[arg-type]
    expected = {
        "in_channels": 64,
        "in_d": 1,
        "in_h": 28,
        "in_w": 30,
        "out_channels": 128,
        "fil_d": 1,
        "fil_h": 3,
    }
    expected |= {"fil_w": 5, "batchsize": 16}
    assert {name: fields[name] for name in expected} == expected
    assert {fields[name] for name in ("in_layout", "wei_layout", "out_layout")} == {layout}
    assert fields["cmd"] == "conv"


def test_a_solver_without_kernels_is_put_to_fin_with_an_empty_list_of_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def call(jobs: list[dict[str, Any]], *_: Any, **__: Any) -> list[dict[str, Any]]:
        asked.extend(json.loads(json.dumps(jobs)))
        return [{}]

    monkeypatch.setattr(fin, "call", call)
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    made = kernel_objects.Compiled(
        "GemmFwdRest", "miopenConvolutionFwdAlgoGEMM", 0, "", False, None, ()
    )
    item = WorkItem(
        job_id=1, attempt=1, session_id=1, library="miopen", step="miopen_perf_eval",
        solver="GemmFwdRest",
        config=parse_line(LINES[0])[0].to_json(), target="gfx908 120",
        candidates=(Candidate(index=0, artifact=store.put(made.dump())),),
    )  # fmt: skip
    library, context = MiopenLibrary(), RunContext(artifacts=store, scratch=tmp_path, cpus=())
    (result,) = library.run(find_step(library, "miopen_perf_eval"), [item], context)
    assert not result.ok, "fin said nothing of it"
    (job,) = asked
    assert job["steps"] == ["alloc_buf", "fill_buf", "miopen_perf_eval"]
    assert job["solvers"] == ["GemmFwdRest"]
    (entry,) = job["miopen_perf_compile_result"]
    assert (entry["solver_name"], entry["kernel_objects"]) == ("GemmFwdRest", [])


def test_the_kernels_that_were_checked_are_what_fin_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to a shared folder changes each file in it as soon as it was read."""
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    code = tuple(
        CodeObject(artifact=store.put(data), name="k", args="") for data in (b"one", b"two")
    )
    made = kernel_objects.Compiled("S", "a", 0, "", False, None, code)
    read = store._files.read

    def read_and_change(name: str) -> bytes:
        data = read(name)
        store._files.write(name, b"evil")
        return data

    monkeypatch.setattr(store._files, "read", read_and_change)
    assert [kernel_objects.decode(found) for found in kernel_objects.fetch(made, store)] == [
        b"one",
        b"two",
    ]
    with pytest.raises(KeyError):
        kernel_objects.fetch(made, store)


def test_queues_are_of_what_can_serve_them_and_not_of_a_session() -> None:
    """MITuna has compile_q_<db>_sess_1, a beginning of compile_q_<db>_sess_10; ours share no
    beginning by chance."""
    assert queue_name(False, "rocm-6.2.0", "key") == "compile.rocm-6.2.0"
    assert queue_name(True, "rocm-6.2.0", "key") == "eval.key"

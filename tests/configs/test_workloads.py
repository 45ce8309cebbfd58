"""Configs with their bodies, as a line of a file and as a mapping."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json

import pytest

from tuna.configs import GemmConfig, TaskConfig, Workload, parse_lines, read_line
from tuna.errors import BadInput

BODY = b"a function" * 50
TASK = TaskConfig(name="softmax", body=hashlib.sha256(BODY).hexdigest())


def packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def test_a_line_has_the_config_and_its_body() -> None:
    line = Workload(TASK, BODY).text()
    assert Workload.parse(line) == Workload(TASK, BODY)
    assert line == Workload(TASK, BODY).text(), "the same bytes each time"
    assert len(line) < len(BODY) + len(TASK.json_text())
    assert list(read_line(line)) == [TASK]
    layer = GemmConfig(m=8, n=8, k=8)
    parsed = parse_lines([line, Workload(layer).text(), Workload(TASK).text()], "file")
    assert parsed.configs == (TASK, layer)
    assert parsed.bodies == {TASK.body: BODY}
    assert parsed.weights == (2, 1)
    assert parse_lines([line], "other").with_others(parsed).bodies == {TASK.body: BODY}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("AAAA", "must be a body, gzip in base64"),
        ("no base64!", "must be a body, gzip in base64"),
        (7, "must be a body, gzip in base64"),
        (packed(b"another"), "is not the body that the task config names"),
    ],
)
def test_a_body_that_is_none_or_another_is_refused(body: object, told: str) -> None:
    line = json.dumps({**TASK.to_json(), "body_gzip": body})
    with pytest.raises(BadInput, match=told):
        Workload.parse(line)
    (rejected,) = parse_lines([line], "file").rejections
    assert told in rejected.reason


def test_a_config_without_a_body_takes_none() -> None:
    line = json.dumps({**GemmConfig(m=8, n=8, k=8).to_json(), "body_gzip": packed(BODY)})
    with pytest.raises(BadInput, match="is not the body that the gemm config names"):
        Workload.parse(line)

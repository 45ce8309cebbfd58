"""Names in the files of FlashInfer's autotuner: keys of operations, and where their entries lie.

A key is `str((custom_op, runner_class_name, nearest_profile, extras))`
(`ProfilingCacheKey.file_key` of FlashInfer 0.7.4). Extras have data types of PyTorch, whose text is
not Python, so a store may also have the fields in JSON: a tuple is `{"__tuple__": [...]}`, a data
type `{"__dtype__": "bfloat16"}` (`_encode_key_fields`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuna.errors import BadInput

SCHEMA = "v2"
METADATA, RECORDS, GENERATION = "_metadata", "_records", "_generation"
#: Names that both headers have; FlashInfer uses neither where one differs from the process's own
VERSIONS = (
    *("flashinfer_version", "cuda_version", "cublas_version", "cudnn_version"),
    *("cudnn_frontend_version", "cutlass_dsl_version", "gpu"),
)
_HEAD = re.compile(r"\('(?P<op>[^'\\]+)', '(?P<runner>[A-Za-z_]\w*)', \(")
_PROFILE = re.compile(r"[-\d, ()]*")


@dataclass(frozen=True)
class OperationKey:
    """What was tuned, and by which runner it is computed."""

    op: str  #: custom op, such as `fp4_gemm`
    runner: str  #: name of the runner's class
    profile: str  #: shapes of the inputs after bucketing, as Python prints them
    extras: str  #: what else the runner distinguishes, as Python prints it

    @property
    def text(self) -> str:
        """The key as FlashInfer makes it."""
        return f"({self.op!r}, {self.runner!r}, {self.profile}, {self.extras})"

    def fields(self) -> Any:
        """Return the structural form in JSON; None where the text is not that of plain values."""
        try:
            node = ast.parse(self.text, mode="eval").body
            return _encoded(node)
        except (SyntaxError, ValueError, RecursionError):
            return None


def parse_key(text: str) -> OperationKey | None:
    """Return the parts of a key; None for a text that FlashInfer does not make."""
    head = _HEAD.match(text)
    if head is None or not text.endswith("))"):
        return None
    start, depth = head.end() - 1, 0
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if depth == 0:
            profile, extras = text[start : end + 1], text[end + 1 : -1]
            if _PROFILE.fullmatch(profile) and extras.startswith(", ("):
                return OperationKey(head["op"], head["runner"], profile, extras[2:])
            break
    return None


def text_of_fields(fields: Any) -> str:
    """Return the key that structural fields stand for; raises ValueError for others."""
    if isinstance(fields, dict) and fields.keys() == {"__tuple__"}:
        parts = [text_of_fields(one) for one in fields["__tuple__"]]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if isinstance(fields, dict) and fields.keys() == {"__dtype__"}:
        return f"torch.{fields['__dtype__']}"
    if isinstance(fields, list):
        return f"[{', '.join(map(text_of_fields, fields))}]"
    if fields is None or isinstance(fields, bool | int | float | str):
        return repr(fields)
    raise ValueError("not the fields of a key")


def _encoded(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple):
        return {"__tuple__": [_encoded(one) for one in node.elts]}
    if isinstance(node, ast.List):
        return [_encoded(one) for one in node.elts]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "torch":
            return {"__dtype__": node.attr}
    elif isinstance(node, ast.Constant | ast.UnaryOp):
        value = ast.literal_eval(node)
        if value is None or isinstance(value, bool | int | float | str):
            return value
    raise ValueError("not the fields of a key")


def canonical(value: Any) -> str:
    """Return JSON as FlashInfer hashes it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def environment_hash(manifest: Mapping[str, Any]) -> str:
    """Return the name of the folder of an environment."""
    return hashlib.sha256(canonical(manifest).encode()).hexdigest()[:16]


def entry_name(key: str) -> str:
    """Return the name of the file of a key's entry."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def content_of(text: str) -> dict[str, Any]:
    """Return a JSON object, whose members `_metadata` and `_records` are objects too; raises
    BadInput."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"it is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadInput("the JSON is not an object")
    for name in (METADATA, RECORDS):
        if not isinstance(content.get(name, {}), dict):
            raise BadInput(f"{name} is not an object")
    return content

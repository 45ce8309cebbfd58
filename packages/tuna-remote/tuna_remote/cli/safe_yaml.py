"""YAML that is only data, with the line of each value: no tags, no aliases, no key twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from tuna.common.files import read_text
from tuna.errors import BadInput

Node: TypeAlias = ScalarNode | SequenceNode | MappingNode
_MAX_BYTES = 16 << 20
_MAX_DEPTH = 100  #: depth of nesting; the parser's time grows with its square
_STANDARD = "tag:yaml.org,2002:"
_SCALARS = ("str", "int", "float", "bool", "null", "timestamp")


def read(path: Path) -> Node:
    """The root of a file; raises BadInput with the line of what is not YAML, or not data."""
    return parse(read_text(path, _MAX_BYTES), str(path))


def parse(text: str, source: str) -> Node:
    """The root of a document that comes from `source`; raises BadInput as `read` does."""
    try:
        depth = 0
        for event in YAML(typ="safe", pure=True).parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise BadInput(f"{source}:{line(event)}: this is nested too deeply.")
            if isinstance(event, AliasEvent):
                raise BadInput(
                    f"{source}:{line(event)}: an alias (*{event.anchor}) is not taken; write the"
                    " value there."
                )
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise BadInput(f"{where}: this is not YAML: {error.problem or error.context}.") from None
    except (YAMLError, ValueError) as error:
        raise BadInput(f"{source} is not YAML: {str(error).splitlines()[0]}.") from None
    if root is None:
        raise BadInput(f"{source} is empty.")
    document: Node = root
    return document


def pairs(node: Node, path: Path | str) -> Iterator[tuple[ScalarNode, Node]]:
    """Key and value of a mapping, in order; raises BadInput for another node, and a key that
    is given twice."""
    if not isinstance(node, MappingNode) or node.tag != f"{_STANDARD}map":
        raise BadInput(
            f"{path}:{line(node)}: a mapping is expected here: name: value.{_about_tag(node)}"
        )
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, ScalarNode) or not _tag(key).startswith(_STANDARD):
            raise BadInput(f"{path}:{line(key)}: a name is expected here.")
        if key.value in seen:
            raise BadInput(f"{path}:{line(key)}: {key.value!r} is given twice.")
        seen.add(key.value)
        yield key, value


def value(node: Node, path: Path | str) -> Any:
    """Return the value of a node: text, numbers, booleans, None, lists, dictionaries. Raises
    BadInput for a tag."""
    if isinstance(node, MappingNode):
        return {str(key.value): value(one, path) for key, one in pairs(node, path)}
    if isinstance(node, SequenceNode) and node.tag == f"{_STANDARD}seq":
        return [value(one, path) for one in node.value]
    kind = _tag(node).removeprefix(_STANDARD)
    if not isinstance(node, ScalarNode) or kind not in _SCALARS:
        raise BadInput(f"{path}:{line(node)}: files are data here.{_about_tag(node)}")
    if kind in ("str", "timestamp"):
        return str(node.value)
    yaml = YAML(typ="safe", pure=True)
    try:
        return yaml.constructor.construct_object(node)
    except (YAMLError, ValueError) as error:
        raise BadInput(
            f"{path}:{line(node)}: {node.value!r} is not a {kind}: {str(error).splitlines()[0]}."
        ) from None


def is_list(node: Node) -> bool:
    """Whether the node is a list without a tag."""
    return isinstance(node, SequenceNode) and _tag(node) == f"{_STANDARD}seq"


def elements(node: Node) -> Sequence[Node]:
    """The nodes of a list."""
    return list(node.value)


def line(node: Any) -> int:
    """The line in which a node begins, from 1."""
    return int(node.start_mark.line) + 1


def _tag(node: Node) -> str:
    return node.tag or ""


def _about_tag(node: Node) -> str:
    name = _tag(node).removeprefix(_STANDARD)
    return (
        ""
        if name in ("map", "seq", *_SCALARS)
        else f" It has the tag {name!r:.80}, and tags are not taken."
    )

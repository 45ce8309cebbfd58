"""The parts of a line that oneDNN prints with `ONEDNN_VERBOSE=1`, in its versions 1 to 3.

    onednn_verbose,v1,primitive,exec,cpu,PRIMITIVE,IMPLEMENTATION,PROP
    KIND,MEMORY,ATTRIBUTES,AUXILIARY,PROBLEM,TIME

Lines have no `v1` before 3.3 and no `primitive` before 3.1; before 2.0 the first word is
`dnnl_verbose`; a timestamp may follow it. Memory is `src:f32:a:blocked:acdb:STRIDES:f0` (name,
type, properties, kind, tag, strides unless packed, flags), before 3.3
`src_f32:a:blocked:acdb:STRIDES:f0`, before 3.0 without strides. The property `a` says that
oneDNN chose the layout. Only `exec` lines count: a `create` line asks for nothing to be computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuna.configs.lines import UnsupportedLine
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput

#: Beginnings of lines; a program's own unfinished line may stand before one.
MARKERS = ("onednn_verbose,", "dnnl_verbose,")
TYPES: dict[str, DataType] = {
    "f32": DataType.FP32,
    "f16": DataType.FP16,
    "bf16": DataType.BF16,
    "s8": DataType.INT8,
    "u8": DataType.UINT8,
    "s32": DataType.INT32,
    "f8_e4m3": DataType.FP8_E4M3,
    "f8_e5m2": DataType.FP8_E5M2,
}
_DIRECTIONS = {
    "forward": Direction.FORWARD,
    "backward_data": Direction.BACKWARD_DATA,
    "backward_weights": Direction.BACKWARD_WEIGHTS,
}
#: The usual line, to the last comma.
_EXECUTED = re.compile(r"d?nnl?_verbose,(?:v\d,)?(?:[\d.]+,)?(?:primitive,)?(exec,.*),")
_NUMBER = re.compile(r"([a-z]+)(-?\d+)")
_MEMORY = re.compile(r"(?:diff_)?(src|wei|bia|dst)\d?[_:](undef|[a-z]+\d+(?:_e\dm\d)?):(.*)")


@dataclass(frozen=True)
class Memory:
    """A tensor of a primitive."""

    data_type: str  #: oneDNN's name of the type, such as f32
    is_any: bool  #: True if oneDNN chose the layout
    tag: str  #: `acdb`: the axes from the slowest to the fastest; capital letters are blocked axes
    strides: tuple[int, ...] | None  #: distance in elements along each axis; None: packed


@dataclass(frozen=True)
class ExecutedPrimitive:
    """An executed operation of oneDNN."""

    kind: str
    prop: str
    memory: dict[str, Memory]  #: tensors; the keys are src, wei, bia, dst
    attributes: dict[str, str]  #: values; the keys are names such as attr-post-ops
    problem: str

    @property
    def direction(self) -> Direction:
        """Which of the three operations; raises UnsupportedLine for another."""
        prop = self.prop.removesuffix("_training").removesuffix("_inference").removesuffix("_bias")
        if prop not in _DIRECTIONS:
            raise UnsupportedLine(
                f"Tuna has no direction for oneDNN's {self.kind} with {self.prop[:40]}"
            )
        return _DIRECTIONS[prop]

    @property
    def numbers(self) -> dict[str, int]:
        """The sizes in a problem such as `mb1_ic3oc64_ih224oh112kh7sh2dh0ph3`; raises BadInput."""
        found = _NUMBER.findall(self.problem)
        if "".join(name + value for name, value in found) != self.problem.replace("_", ""):
            raise BadInput(
                f"oneDNN's {self.kind} has sizes that cannot be read: {self.problem[:80]}"
            )
        return {name: int(value) for name, value in found}

    def types(self) -> tuple[DataType, DataType, DataType]:
        """Return the types of src, wei and dst; raises UnsupportedLine for one that Tuna lacks."""
        names = [self.memory[name].data_type for name in ("src", "wei", "dst")]
        if not TYPES.keys() >= set(names):
            raise UnsupportedLine(
                f"Tuna has no type for oneDNN's {self.kind} of {', '.join(names)}"
            )
        return TYPES[names[0]], TYPES[names[1]], TYPES[names[2]]


def asks_for(line: str) -> str | None:
    """Return the line from `exec` or `graph` on, without its time; None for other lines."""
    executed = _EXECUTED.search(line)
    if executed is not None:
        return executed[1]
    start = max(line.find(marker) for marker in MARKERS)
    words = line[start:].split(",", 5)
    place = 1
    while place < len(words) - 1 and (
        words[place] in ("v0", "v1", "primitive") or words[place][:1].isdigit()
    ):
        place += 1
    if words[place] not in ("exec", "graph"):
        return None if len(words) > place + 1 else "cut"
    if words[place] == "graph" and words[place + 1 : place + 2] != ["exec"]:
        return None
    return ",".join(words[place:]).rpartition(",")[0]


def primitive(line: str) -> ExecutedPrimitive:
    """Parse an `exec` line.

    Raises BadInput for one that is cut short, UnsupportedLine for a part of a graph.
    """
    text = asks_for(line) or ""
    if text.startswith("graph"):
        raise UnsupportedLine("Tuna tunes no partitions of oneDNN graphs")
    words = text.split(",")
    if len(words) < 9 or not words[-1]:
        raise BadInput("the oneDNN line is cut short")
    if len(words) > 9:
        raise BadInput(f"the line of oneDNN's {words[2][:40]} has more fields than are known")
    _, _engine, kind, _implementation, prop, memory, attributes, auxiliary, problem = words
    named = dict(filter(None, (_memory(word) for word in memory.split())))
    pairs = (word.partition(":") for word in f"{attributes} {auxiliary}".split())
    return ExecutedPrimitive(kind, prop, named, {name: value for name, _, value in pairs}, problem)


def _memory(word: str) -> tuple[str, Memory] | None:
    found = _MEMORY.match(word)
    if found is None:
        return None
    name, data_type, rest = found.groups()
    parts = rest.split(":")
    if parts[1:2] == ["sparse"]:
        raise UnsupportedLine("Tuna does not tune oneDNN's sparse tensors")
    text = parts[3] if len(parts) > 4 else ""
    strides = tuple(map(int, text.split("x"))) if re.fullmatch(r"\d+(x\d+)*", text) else None
    return name, Memory(data_type, "a" in parts[0], parts[2] if len(parts) > 2 else "", strides)

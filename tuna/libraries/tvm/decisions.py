"""The sampled decisions of a MetaSchedule trace, read from its JSON: how they vary, what a cost
model sees of them, and their text for people. No TVM.

A trace is a list of instructions `[name, inputs, attributes, outputs]` and a list of decisions
`[instruction, decision]`. Traces with the same instructions are of one design; its decisions in
their order, flattened, are the numbers of a point.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from random import Random
from typing import Any

from tuna.libraries.kernels import CandidateFacts

#: Annotation with which one of our kernels says its parameters; `problems` writes it
OWN = "tuna.params"
_POSTPROC = "EnterPostproc"
_TILE, _CHOICE, _LOCATION = "SamplePerfectTile", "SampleCategorical", "SampleComputeLocation"
_UNROLL = "SampleCategorical(meta_schedule.unroll_explicit)"
#: Place of a block that is computed outside of all loops
_ROOT = -1

#: Names of the places of a block that are not loops
_PLACES = {_ROOT: "at root", -2: "inlined"}
_SPATIAL, _REDUCTION = 4, 2
#: Number of fp32 values in a vector, from the longest on
_LANES = (16, 8, 4)


@dataclass(frozen=True)
class Decision:
    """One sampling instruction of a design."""

    instruction: int  #: index of the instruction in the trace
    kind: str
    #: text of what it decides: the block and loop that it tiles, the annotation that it gives
    label: str
    parts: int  #: number of its numbers
    #: all values; for an unknown kind, only the one in the trace
    options: tuple[tuple[int, ...], ...]

    def mutated(self, value: tuple[int, ...], chance: Random) -> tuple[int, ...]:
        """Another value; of a tile one that differs by one factor where there is such."""
        if self.kind == _TILE:
            near = _moved(value, self.options, chance)
            if near is not None:
                return near
        others = [option for option in self.options if option != value]
        return chance.choice(others) if others else value


@dataclass(frozen=True)
class Design:
    """Schedules that differ only in their decisions."""

    #: instructions as JSON, without those of postprocessing
    instructions: tuple[Any, ...] = field(hash=False)
    decisions: tuple[Decision, ...]

    @classmethod
    def read(
        cls, trace: Sequence[Any], locations: Mapping[int, Sequence[int]] | None = None
    ) -> Design:
        """The design of a trace; `locations`: what else compute locations may be, by
        instruction."""
        instructions = before_postproc(trace)
        labels = _labels(instructions)
        decisions = []
        for place, value in own_decisions(trace):
            name, _, attributes, _ = instructions[place]
            numbers = _numbers(value)
            options: tuple[tuple[int, ...], ...] = (numbers,)
            if name == _TILE:
                options = factorisations(math.prod(numbers), int(attributes[0]), int(attributes[1]))
            elif name == _CHOICE:
                options = tuple((index,) for index in range(len(attributes[0])))
            elif name == _LOCATION:
                options = tuple(
                    (at,) for at in sorted({_ROOT, *numbers, *(locations or {}).get(place, ())})
                )
            decisions.append(Decision(place, name, labels[place], len(numbers), options))
        return cls(tuple(instructions), tuple(decisions))

    @functools.cached_property
    def _name(self) -> str:
        """The same for the same design of another size: its instructions hold no extents."""
        return "design." + hashlib.sha256(key_of([self.instructions, []]).encode()).hexdigest()[:8]

    def size(self) -> int:
        """Number of combinations of decisions; not every one need be a valid schedule."""
        return math.prod(len(decision.options) for decision in self.decisions)

    def values(self) -> Iterator[tuple[int, ...]]:
        """Yield all combinations of decisions."""
        for parts in itertools.product(*(decision.options for decision in self.decisions)):
            yield tuple(itertools.chain.from_iterable(parts))

    def split(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The numbers of a point by decision."""
        numbers = iter(values)
        return [tuple(itertools.islice(numbers, decision.parts)) for decision in self.decisions]

    def trace(self, values: tuple[int, ...]) -> list[Any]:
        """The JSON of the trace with these decisions."""
        decided = [
            [one.instruction, value[0] if one.kind in (_CHOICE, _LOCATION) else list(value)]
            for one, value in zip(self.decisions, self.split(values), strict=True)
        ]
        return [list(self.instructions), decided]

    def features(self, values: tuple[int, ...]) -> dict[str, float]:
        """Return the features of a point: logarithms of each tile's factors, of their products from
        the innermost on, and of the extent; the values of other decisions."""
        features: dict[str, float] = {self._name: 1.0}
        level: dict[str, float] = {}
        for decision, value in zip(self.decisions, self.split(values), strict=True):
            if decision.kind == _TILE:
                inner = 0.0
                for part in reversed(range(decision.parts)):
                    factor = math.log2(value[part])
                    inner += factor
                    features[f"{decision.label}.{part}"] = factor
                    features[f"{decision.label}.within{part}"] = inner
                    name = f"tiles{decision.parts}.{part}"
                    level[name] = level.get(name, 0.0) + factor
            elif decision.kind == _CHOICE:
                features[decision.label] = self._choice(decision, value)
            else:
                for part, number in enumerate(value):
                    features[f"{decision.label}.{part}"] = float(number)
        return features | level | self._tiling(values)

    def unrolling(self, values: tuple[int, ...]) -> int:
        """The most statements that a loop nest is unrolled to."""
        split = zip(self.decisions, self.split(values), strict=True)
        steps = [
            self._choice(decision, value) for decision, value in split if decision.label == _UNROLL
        ]
        return int(max(steps, default=0))

    def _choice(self, decision: Decision, value: tuple[int, ...]) -> float:
        return float(self.instructions[decision.instruction][2][0][value[0]])

    def _tiling(self, values: tuple[int, ...]) -> dict[str, float]:
        """Return the `tiling_features` of a point."""
        split = list(zip(self.decisions, self.split(values), strict=True))
        tiles = [value for decision, value in split if decision.kind == _TILE]
        location = sum(value[0] for decision, value in split if decision.kind == _LOCATION)
        names = [instruction[0] for instruction in self.instructions]
        return tiling_features(tiles, self.unrolling(values), location, names)


def before_postproc(trace: Sequence[Any]) -> list[Any]:
    """The instructions of a trace but those that postprocessors added."""
    return list(itertools.takewhile(lambda instruction: instruction[0] != _POSTPROC, trace[0]))


def own_decisions(trace: Sequence[Any]) -> list[tuple[int, Any]]:
    """(instruction, decision) of a trace, but of what postprocessors sampled."""
    count = len(before_postproc(trace))
    return sorted((int(place), value) for place, value in trace[1] if int(place) < count)


def trace_of(params: str) -> Any:
    """The trace in a record, None for a text that has none."""
    try:
        trace = json.loads(params)[0]
        before_postproc(trace)
        own_decisions(trace)
    except (ValueError, TypeError, LookupError):
        return None
    return trace


def features_of(params: str) -> Mapping[str, float] | None:
    """Return the features of the schedule in a record; None for a text that has none."""
    trace = trace_of(params)
    if not trace:
        return None
    design = _design_of(key_of(trace), json.dumps(own_decisions(trace)))
    return design.features(values_of(trace))


def facts_of(params: str) -> CandidateFacts | None:
    """Return what a predictor sees of a record: of a kernel of ours its point, else the schedule's
    decisions; None for another text."""
    try:
        trace = trace_of(params)
        if trace and (point := _own(trace[0])):
            named = by_name(params).items()
            values = {name: value for name, value in named if isinstance(value, int)}
            return CandidateFacts(point, {f"point.{name}": float(values[name]) for name in values})
        features = features_of(params)
    except (ValueError, TypeError, LookupError):  # of another version
        return None
    return CandidateFacts("", features) if features else None


@functools.lru_cache(maxsize=4096)
def _design_of(key: str, decisions: str) -> Design:
    return Design.read([json.loads(key), json.loads(decisions)])


@functools.cache
def built_in_prior() -> bytes:
    """Return the cost model that `benchmarks/train_prior.py` trained."""
    return resources.files(__package__).joinpath("prior.model").read_bytes()


def key_of(trace: Sequence[Any]) -> str:
    """Return a text that is equal for all traces of one design."""
    return json.dumps(before_postproc(trace), separators=(",", ":"))


def values_of(trace: Sequence[Any]) -> tuple[int, ...]:
    """The decisions of a trace as the numbers of a point."""
    return tuple(
        itertools.chain.from_iterable(_numbers(value) for _, value in own_decisions(trace))
    )


@functools.lru_cache(maxsize=1024)
def factorisations(extent: int, parts: int, innermost: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write `extent` as an ordered product of `parts` factors whose last is at most
    `innermost`."""
    if parts == 1:
        return ((extent,),) if extent <= innermost else ()
    divisors = [divisor for divisor in range(1, extent + 1) if extent % divisor == 0]
    return tuple(
        (first, *rest)
        for first in divisors
        for rest in factorisations(extent // first, parts - 1, innermost)
    )


def _moved(
    value: tuple[int, ...], options: tuple[tuple[int, ...], ...], chance: Random
) -> tuple[int, ...] | None:
    """The tile with one prime factor at another place, if such is an option."""
    known = _as_set(options)
    moves = []
    for source, factor in enumerate(value):
        for prime in _primes(factor):
            for goal in range(len(value)):
                if goal != source:
                    changed = list(value)
                    changed[source] //= prime
                    changed[goal] *= prime
                    if tuple(changed) in known:
                        moves.append(tuple(changed))
    return chance.choice(moves) if moves else None


@functools.lru_cache(maxsize=1024)
def _as_set(options: tuple[tuple[int, ...], ...]) -> frozenset[tuple[int, ...]]:
    return frozenset(options)


@functools.cache
def _primes(number: int) -> tuple[int, ...]:
    """The different prime factors."""
    return tuple(
        prime
        for prime in range(2, number + 1)
        if number % prime == 0 and all(prime % smaller for smaller in range(2, prime))
    )


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in value) if isinstance(value, list | tuple) else (int(value),)


def _labels(instructions: Sequence[Any]) -> dict[int, str]:
    """Return for each sampling instruction a label of what it decides; it is the same in similar
    problems."""
    names: dict[str, str] = {}
    used: dict[str, str] = {}
    for name, inputs, attributes, outputs in instructions:
        if name == "GetSBlock":
            names[outputs[0]] = str(attributes[0])
        elif name == "Annotate" and isinstance(inputs[1], str):
            used[inputs[1]] = str(attributes[0])
        else:
            of = names.get(inputs[0], name) if inputs and isinstance(inputs[0], str) else name
            short = {"GetLoops": "", "Split": "split"}.get(name, name)
            names.update({output: f"{of}{short}{index}" for index, output in enumerate(outputs)})
    labels: dict[int, str] = {}
    for place, (name, inputs, _, outputs) in enumerate(instructions):
        choice = used.get(outputs[0] if outputs else "", "choice")
        of = names.get(inputs[0], "") if inputs else choice
        label = f"{name}({of})"
        repeats = sum(known == label or known.startswith(f"{label}#") for known in labels.values())
        labels[place] = f"{label}#{repeats}" if repeats else label
    return labels


def tiling_features(
    tiles: Sequence[Sequence[int]], unrolling: int, location: int, instructions: Sequence[str]
) -> dict[str, float]:
    """Return features of a tiled loop nest that mean the same for every problem: logarithms to the
    base 2 of products of factors; none for a nest without spatial tiles.

    MetaSchedule tiles a nest for a CPU as SSRSRS: the spatial loops four times (from 0, outermost,
    to 3), the reductions twice. The innermost part of the last spatial loop becomes vectors; those
    of the others are values that are kept in registers.

    `tiles`: the factors of each tiled loop, the outermost first; `unrolling`: statements that a
    nest is unrolled to at most; `location`: the sum of sampled compute locations; `instructions`:
    names of the trace's.
    """
    spatial = [tile for tile in tiles if len(tile) == _SPATIAL]
    reductions = [tile for tile in tiles if len(tile) == _REDUCTION]
    if not spatial:
        return {}
    *others, last = spatial
    features = {f"tiling.last{part}": math.log2(last[part]) for part in range(_SPATIAL)}
    for part in range(_SPATIAL):
        features[f"tiling.others{part}"] = sum(math.log2(tile[part]) for tile in others)
    for part in (2, 3):
        features[f"tiling.tiled{part}"] = float(sum(tile[part] > 1 for tile in others))
    inner = sum(math.log2(tile[-1]) for tile in reductions)
    kept = features["tiling.last3"] + features["tiling.others3"]
    lanes = next((lanes for lanes in _LANES if last[3] % lanes == 0), 1)
    unrolled = math.log2(unrolling + 1)
    return {
        **features,
        "tiling.lanes": math.log2(lanes),
        "tiling.inner_reduction": inner,
        "tiling.outer_reduction": sum(math.log2(tile[0]) for tile in reductions),
        "tiling.registers": math.log2(2**kept / lanes + 1),
        "tiling.body": kept + inner,
        "tiling.unrolling": unrolled,
        "tiling.beyond_unrolling": kept + inner - unrolled,
        "tiling.location": float(location),
        "tiling.caches": float(instructions.count("CacheWrite")),
        "tiling.moved": float(instructions.count("ReverseComputeAt")),
    }


#: Errors of params that are not a record
_NO_RECORD = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def readable(params: str) -> str:
    """The parameters that a record names itself, or the decisions of a MetaSchedule record: `tiles
    4·2·1·8, unroll explicit 64`.

    Any other text stays as it is.
    """
    try:
        instructions, decisions = json.loads(params)[0]
        return _own(instructions) or _text(instructions, dict(decisions)) or params
    except _NO_RECORD:
        return params


def by_name(params: str) -> dict[str, Any]:
    """The parameters that a record names itself, or the decisions of a MetaSchedule record by what
    they decide, a tile's by part: whole numbers, but for choices among other values; of any other
    text none."""
    try:
        trace = json.loads(params)[0]
        if own := _own(trace[0]):
            pairs = (part.partition(" ") for part in own.split(", "))
            return {name: int(word) if word.isdigit() else word for name, _, word in pairs}
        labels, found = _labels(before_postproc(trace)), dict[str, Any]()
        for place, value in own_decisions(trace):
            name, _, attributes, _ = trace[0][place]
            if name == _CHOICE:
                found[labels[place]] = attributes[0][value]
            else:
                for part, number in enumerate(_numbers(value)):
                    found[labels[place] + (f".{part}" if name == _TILE else "")] = number
        return found
    except _NO_RECORD:
        return {}


def _own(instructions: Sequence[Any]) -> str:
    """The text in which a kernel of ours names its parameters; empty for any other."""
    for name, inputs, attributes, _ in reversed(instructions):
        if name == "Annotate" and attributes == [OWN]:
            return str(json.loads(inputs[1]))
    return ""


def _text(instructions: Sequence[Any], decisions: Mapping[int, Any]) -> str:
    uses = {  # the variable of a sampled value, and what it is for
        inputs[1]: attributes[0].rpartition(".")[2].replace("_", " ")
        for name, inputs, attributes, _ in instructions
        if name == "Annotate" and isinstance(inputs[1], str)
    }
    tiles: list[str] = []
    others: list[str] = []
    for index, (name, _, attributes, outputs) in enumerate(instructions):
        if index not in decisions:
            continue
        decision = decisions[index]
        if name == "SamplePerfectTile":
            tiles.append("·".join(map(str, decision)))
        elif name == "SampleCategorical":
            values = attributes[0]
            if values == list(range(len(values))) and outputs[0] not in uses:
                others.append(f"point {decision + 1} of {len(values)}")
            else:
                others.append(f"{uses.get(outputs[0], 'choice')} {values[decision]}")
        elif name == "SampleComputeLocation":
            others.append(_PLACES.get(decision, f"at loop {decision}"))
        else:
            others.append(f"{name} {json.dumps(decision)}")
    return ", ".join([*(["tiles " + " ".join(tiles)] if tiles else []), *others])

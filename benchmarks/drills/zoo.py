"""Specimens of the file zoo: what a kind of file is made of, and what must be said of it.

A kind is a function of a random generator, registered by `kind`, that returns one specimen. The
modules `costs`, `encoding`, `structure`, `operators`, `foreign` and `healthy` have the kinds.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

#: Name of a specimen's file.
FILE = "model.onnx"


class Expected(enum.Enum):
    """The right outcome of an import."""

    REFUSED = enum.auto()  #: with a sentence that has the words
    ACCEPTED = enum.auto()
    EITHER = enum.auto()  #: a broken file that may still be a model


@dataclass(frozen=True)
class Specimen:
    """One file, and what must be said of it."""

    files: Mapping[str, bytes]  #: by name; the model itself is `FILE`
    #: Parts of the sentence, each with its alternatives behind `|`; case does not count
    says: Sequence[str] = ()
    expected: Expected = Expected.REFUSED
    options: Sequence[str] = ()  #: of `tuna model import`
    prepare: Callable[[Path], None] | None = None  #: makes what is not a plain file in the folder

    def write(self, folder: Path) -> Path:
        """Write the files into an empty folder, return the place of the model."""
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        if self.prepare is not None:
            self.prepare(folder)
        return folder / FILE


Maker = Callable[[random.Random], Specimen]
#: Makers by name of the kind.
KINDS: dict[str, Maker] = {}


def kind(maker: Maker) -> Maker:
    """Decorate the maker of a kind, which has its name."""
    KINDS[maker.__name__] = maker
    return maker


def pick(rng: random.Random, options: Sequence[Any]) -> Any:
    """One of options of any types."""
    return rng.choice(options)


@dataclass(frozen=True)
class Numbered:
    """A specimen's kind and number, by which it is made again."""

    kind: str
    number: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"

    def make(self) -> Specimen:
        """Make the specimen; the same each time."""
        rng = random.Random(f"{self.seed} {self.kind} {self.number}")  # noqa: S311
        return KINDS[self.kind](rng)


def chosen(seed: int, count: int, only: str = "") -> Iterator[Numbered]:
    """Yield `count` specimens, the kinds in turn; `only` is a kind, or KIND:NUMBER."""
    name, _, number = only.partition(":")
    if number:
        yield Numbered(name, int(number), seed)
        return
    names = [name] if name else list(KINDS)
    for place in range(count):
        yield Numbered(names[place % len(names)], place // len(names), seed)


@dataclass
class Graph:
    """A model in the making. Its nodes have names by which a sentence can name them."""

    rng: random.Random
    opset: int = 18
    nodes: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)

    def input(self, *shape: Any, type: int = TensorProto.FLOAT, name: str = "x") -> str:
        """Add an input."""
        self.inputs.append(helper.make_tensor_value_info(name, type, shape))
        return name

    def constant(self, values: Any, type: int = TensorProto.INT64, name: str = "") -> str:
        """Add a weight: a list of values, or one without dimensions."""
        name = name or f"c{len(self.weights)}"
        flat = values if isinstance(values, list) else [values]
        dims = [len(values)] if isinstance(values, list) else []
        self.weights.append(helper.make_tensor(name, type, dims, flat))
        return name

    def weight(self, *shape: int, type: int = TensorProto.FLOAT, name: str = "") -> str:
        """Add a weight with random values."""
        name = name or f"w{len(self.weights)}"
        count = 1
        for extent in shape:
            count *= extent
        values: list[Any] = [self.rng.gauss(0, 0.3) for _ in range(count)]
        if type in (TensorProto.INT8, TensorProto.UINT8):
            values = [self.rng.randrange(0, 127) for _ in range(count)]
        self.weights.append(helper.make_tensor(name, type, shape, values))
        return name

    # attributes that are drawn have any type, so the others have too
    def node(
        self, operator: str, inputs: Sequence[str], outputs: Any = 1,
        name: Any = None, domain: Any = "", **attributes: Any,
    ) -> str:  # fmt: skip
        """Add a node, return its first output."""
        number = len(self.nodes)
        if isinstance(outputs, int):
            outputs = [f"v{number}_{place}" for place in range(outputs)]
        name = f"{operator.lower()}_{self.rng.randrange(1 << 20)}" if name is None else name
        self.nodes.append(
            helper.make_node(operator, inputs, outputs, name=name, domain=domain, **attributes)
        )
        return str(outputs[0]) if outputs else ""

    @property
    def last(self) -> Any:
        """The node that was added last."""
        return self.nodes[-1]

    def output(self, name: str, type: int = TensorProto.FLOAT) -> None:
        """Add an output of any shape."""
        self.outputs.append(helper.make_tensor_value_info(name, type, None))

    def model(self) -> Any:
        """The model, unchecked."""
        graph = helper.make_graph(self.nodes, "zoo", self.inputs, self.outputs, self.weights)
        imports = [helper.make_opsetid(domain, 1) for domain in self.domains]
        model = helper.make_model(
            graph,
            functions=self.functions,
            opset_imports=[helper.make_opsetid("", self.opset), *imports],
        )
        model.ir_version = 10
        return model

    def specimen(
        self, result: str, *says: str, type: int = TensorProto.FLOAT,
        expected: Expected = Expected.REFUSED, options: Sequence[str] = (),
    ) -> Specimen:  # fmt: skip
        """The specimen whose last value is `result`. Without `says` a refusal has to name the last
        node and its operator."""
        if not self.outputs:
            self.output(result, type)
        if not says and expected is Expected.REFUSED:
            says = (self.last.op_type, self.last.name)
        return of(self.model(), *says, expected=expected, options=options)


def of(
    model: Any, *says: str, expected: Expected = Expected.REFUSED, options: Sequence[str] = ()
) -> Specimen:
    """The specimen of a model."""
    return Specimen({FILE: model.SerializeToString()}, says, expected, options)


def perceptron(rng: random.Random, opset: int = 18) -> Graph:
    """A small network: two products with an activation."""
    graph = Graph(rng, opset)
    x, width = graph.input(rng.choice([1, 2, 4]), 16), rng.choice([8, 24, 32])
    hidden = graph.node("Relu", [graph.node("MatMul", [x, graph.weight(16, width)])])
    graph.output(graph.node("Gemm", [hidden, graph.weight(width, 10), graph.weight(10)]))
    return graph


def doubled(graph: Graph, depth: int) -> str:
    """The only output of a graph with the input x: a call of functions of which each calls the one
    before twice."""
    graph.domains.append("zoo")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("zoo", 1)]
    for number in range(depth):
        inner, domain = (f"Twice{number - 1}", "zoo") if number else ("Relu", "")
        nodes = [
            helper.make_node(inner, ["a"], ["b"], domain=domain),
            helper.make_node(inner, ["b"], ["c"], domain=domain),
        ]
        graph.functions.append(
            helper.make_function("zoo", f"Twice{number}", ["a"], ["c"], nodes, imports)
        )
    graph.outputs.clear()
    return graph.node(f"Twice{depth - 1}", ["x"], domain="zoo")


def picture(rng: random.Random, channels: int = 3, size: int = 8, opset: int = 18) -> Graph:
    """A graph with an image as its input, and nothing else."""
    graph = Graph(rng, opset)
    graph.input(1, channels, size, size)
    return graph


def body(
    nodes: Sequence[Any], inputs: Sequence[tuple[str, int, Sequence[int] | None]],
    outputs: Sequence[tuple[str, int]], name: str = "body",
) -> Any:  # fmt: skip
    """A graph in a node: a branch, or the body of a loop."""
    return helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value, None) for value in outputs],
    )


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def loaded(specimen: Specimen) -> Any:
    """The model of a specimen, to be changed."""
    return onnx.load_from_string(specimen.files[FILE])

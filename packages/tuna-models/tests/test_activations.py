"""An activation is recognised in every way to write it, and what differs from it by a constant is
not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from nets import Net

from tuna.configs.task import BIAS
from tuna_models.compiler import graph, groups, rules
from tuna_models.reading import importer

Form = Callable[[Net, str], str]


def grouped(write: Form) -> tuple[tuple[str, ...], bool]:
    """What becomes part of the product before the operators that `write` adds, and whether all."""
    net = Net((2, 8))
    x = net.add("MatMul", "x", net.constant(net.random.normal(0, 0.3, (8, 8))))
    found = graph.read(importer.to_relax(net.model(write(net, x)), "net"))
    (group,), _ = groups.find(found, 16)
    rules.extend(group, found, set())
    return tuple(part for part in group.epilogue if part != BIAS), found.is_result(group.answer)


def binary(operator: str, value: float, *, first: bool = False) -> Form:
    def write(net: Net, x: str) -> str:
        given = (net.constant(value), x) if first else (x, net.constant(value))
        return net.add(operator, *given)

    return write


def unary(operator: str, **attributes: float | str) -> Form:
    return lambda net, x: net.add(operator, x, **attributes)


def chain(*steps: Form) -> Form:
    def write(net: Net, x: str) -> str:
        for step in steps:
            x = step(net, x)
        return x

    return write


def joined(operator: str, first: Form, second: Form) -> Form:
    return lambda net, x: net.add(operator, first(net, x), second(net, x))


def clip(low: float | None, high: float | None) -> Form:
    def write(net: Net, x: str) -> str:
        bounds = ["" if bound is None else net.constant(bound) for bound in (low, high)]
        return net.add("Clip", x, *bounds)

    return write


def same(_: Net, x: str) -> str:
    return x


def erf(scale: Form) -> Form:
    """1 + erf(x / sqrt(2))."""
    return chain(scale, unary("Erf"), binary("Add", 1.0))


def cube(net: Net, x: str) -> str:
    return net.add("Mul", x, net.add("Mul", x, x))


def inner(factor: float, power: Form) -> Form:
    """The argument of the tanh of GELU."""
    return chain(
        joined("Add", same, chain(power, binary("Mul", 0.044715))),
        binary("Mul", factor, first=True),
    )


def tanh_gate(factor: float, power: Form) -> Form:
    return chain(inner(factor, power), unary("Tanh"), binary("Add", 1.0, first=True))


HALF, ROOT, ROOT_2_PI = binary("Mul", 0.5), 0.5**0.5, (2.0 / np.pi) ** 0.5
PLUS_3 = binary("Add", 3.0)
LOGISTIC = chain(unary("Neg"), unary("Exp"), binary("Add", 1.0), binary("Div", 1.0, first=True))
FACTORED = chain(
    joined("Mul", same, same),
    binary("Mul", ROOT_2_PI * 0.044715),
    binary("Add", ROOT_2_PI),
)

WRITTEN: dict[str, list[Form]] = {
    "relu": [
        unary("Relu"),
        clip(0.0, None),
        binary("Max", 0.0, first=True),
        chain(unary("Relu"), unary("Relu")),
        chain(unary("Neg"), binary("Min", 0.0), unary("Neg")),
    ],
    "relu6": [
        clip(0.0, 6.0),
        chain(unary("Relu"), binary("Min", 6.0)),
        chain(binary("Min", 6.0), unary("Relu")),
        chain(binary("Max", 0.0), binary("Min", 6.0, first=True)),
        chain(binary("Div", 6.0), clip(0.0, 1.0), binary("Mul", 6.0)),
    ],
    "sigmoid": [
        unary("Sigmoid"),
        LOGISTIC,
        chain(
            binary("Mul", -1.0), unary("Exp"), binary("Add", 1.0, first=True), unary("Reciprocal")
        ),
        chain(HALF, unary("Tanh"), HALF, binary("Add", 0.5)),
        chain(unary("Neg"), unary("Sigmoid"), binary("Sub", 1.0, first=True)),
    ],
    "tanh": [
        unary("Tanh"),
        chain(binary("Mul", 2.0), unary("Sigmoid"), binary("Mul", 2.0), binary("Sub", 1.0)),
    ],
    "silu": [
        joined("Mul", same, unary("Sigmoid")),
        joined("Mul", unary("Sigmoid"), same),
        joined("Mul", same, LOGISTIC),
        joined("Div", same, chain(unary("Neg"), unary("Exp"), binary("Add", 1.0))),
    ],
    "gelu": [
        chain(joined("Mul", same, erf(binary("Div", 2.0**0.5))), HALF),
        chain(joined("Mul", same, erf(binary("Div", 1.4142))), HALF),
        joined("Mul", HALF, erf(binary("Mul", ROOT))),
        joined("Mul", same, chain(erf(binary("Mul", 0.7071)), HALF)),
        joined("Mul", same, chain(binary("Mul", 0.70711), unary("Erf"), HALF, binary("Add", 0.5))),
        joined("Add", HALF, joined("Mul", HALF, chain(binary("Mul", ROOT), unary("Erf")))),
    ],
    "gelu_tanh": [
        joined("Mul", HALF, tanh_gate(ROOT_2_PI, binary("Pow", 3.0))),
        joined("Mul", HALF, tanh_gate(0.7978846, cube)),
        chain(joined("Mul", same, tanh_gate(0.79788, binary("Pow", 3.0))), HALF),
        joined("Mul", same, chain(tanh_gate(0.797885, cube), HALF)),
        joined("Mul", same, chain(inner(2.0 * ROOT_2_PI, cube), unary("Sigmoid"))),
        joined(
            "Mul",
            HALF,
            chain(joined("Mul", same, FACTORED), unary("Tanh"), binary("Add", 1.0)),
        ),
    ],
    "hard_sigmoid": [
        unary("HardSigmoid", alpha=1.0 / 6.0, beta=0.5),
        chain(PLUS_3, clip(0.0, 6.0), binary("Div", 6.0)),
        chain(PLUS_3, unary("Relu"), binary("Min", 6.0), binary("Mul", 1.0 / 6.0)),
        chain(PLUS_3, clip(0.0, 6.0), binary("Mul", 0.16667)),
        chain(binary("Mul", 1.0 / 6.0), binary("Add", 0.5), binary("Min", 1.0), binary("Max", 0.0)),
        chain(clip(-3.0, 3.0), PLUS_3, binary("Div", 6.0)),
    ],
    "hard_swish": [
        joined("Mul", same, unary("HardSigmoid", alpha=1.0 / 6.0, beta=0.5)),
        joined("Mul", same, chain(PLUS_3, clip(0.0, 6.0), binary("Div", 6.0))),
        chain(joined("Mul", same, chain(PLUS_3, clip(0.0, 6.0))), binary("Div", 6.0)),
        joined("Mul", binary("Div", 6.0), chain(PLUS_3, clip(0.0, 6.0))),
        unary("HardSwish"),
    ],
}


@pytest.mark.parametrize(
    ("name", "number"), [(name, at) for name, forms in WRITTEN.items() for at in range(len(forms))]
)
def test_an_activation_is_recognised_as_exporters_write_it(name: str, number: int) -> None:
    assert grouped(WRITTEN[name][number]) == ((name,), True)


#: By what should become part of the product: the rest stays.
OTHERS: dict[tuple[str, ...], list[Form]] = {
    ("relu",): [
        clip(0.0, 255.0),
        chain(unary("Relu"), binary("Min", 20.0)),
        clip(0.0, 6.0001),
    ],
    ("relu", "affine"): [
        chain(unary("Relu"), binary("Add", 1e-5)),
        chain(unary("Relu"), binary("Add", 1e-12)),
    ],
    ("relu6", "affine"): [chain(PLUS_3, clip(0.0, 6.0), binary("Mul", 0.1667))],
    ("sigmoid", "affine"): [chain(unary("Sigmoid"), binary("Mul", 1.00001))],
    ("sigmoid",): [
        chain(unary("Sigmoid"), clip(1e-5, 1.0 - 1e-5)),
        chain(unary("Sigmoid"), binary("Sub", 1.5e-5)),
    ],
    (): [
        joined("Mul", same, chain(binary("Mul", 1.00001), unary("Sigmoid"))),
        clip(1e-6, None),
        clip(-15.0, 6.0),
        chain(binary("Min", 15.0), joined("Mul", same, unary("Sigmoid"))),
        chain(joined("Mul", same, erf(binary("Mul", 0.7072))), HALF),
        joined("Mul", HALF, tanh_gate(0.798, cube)),
        joined("Mul", same, chain(binary("Mul", 1.702), unary("Sigmoid"))),
        unary("HardSigmoid", alpha=0.2, beta=0.5),
        chain(unary("Neg"), unary("Exp"), binary("Add", 1.00001), unary("Reciprocal")),
        chain(binary("Max", np.inf), binary("Min", 6.0)),
        chain(binary("Pow", 4.0), joined("Mul", same, same), joined("Mul", same, same)),
    ],
}


@pytest.mark.parametrize(
    ("part", "number"), [(part, at) for part, forms in OTHERS.items() for at in range(len(forms))]
)
def test_a_bound_or_an_epsilon_of_any_size_stays(part: tuple[str, ...], number: int) -> None:
    assert grouped(OTHERS[part][number]) == (part, "affine" in part)

"""Recognises activations however an exporter wrote them, by proof: operators and constants are
brought into a normal form, which has to be that of the definition. Imports TVM.

The form is a polynomial over atoms: the argument `x`, and erf, exp, sigmoid and clip of a form. By
these identities each way to write an activation has one form:

    tanh(u) = 2 sigmoid(2u) - 1      1 / (1 + c exp(u)) = sigmoid(-u - ln c)
    sigmoid(-u) = 1 - sigmoid(u)     erf(-u) = -erf(u)
    clip(a u + b, l, h) = a clip(u, (l - b) / a, (h - b) / a) + b
    max(u, l) = clip(u, l, inf)      min(u, h) = clip(u, -inf, h)

What has no form, such as a quotient of two variables, is not part of an activation. A constant that
differs from the definition's by more than the rounding of fp32 makes another function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from tvm import relax

from tuna.configs.task import DEFINITIONS
from tuna_models.compiler.graph import Graph, Node, constant_of, extents

#: Operators from which exporters make an activation. GELU by tanh has nine.
_MAX_OPERATORS = 12
#: Largest relative difference of coefficients: a few constants in fp32, multiplied.
_FP32 = 5e-7
#: A sum this small beside its terms is the rounding of double precision.
_CANCELLED = 1e-15
#: Constants that exporters also write with few digits, such as 0.7071, 1.4142 or 0.16667.
_ROUNDED = (math.sqrt(2.0), math.sqrt(0.5), math.sqrt(2.0 / math.pi), 1.0 / 6.0)
#: Largest relative difference of these, and the decimal places of the shortest ones.
_FEW_DIGITS, _DECIMALS = 2.5e-5, range(4, 10)
#: Largest exponent, terms of a product, and characters of a form, whose size nothing else bounds.
_MAX_POWER, _MAX_TERMS, _MAX_TEXT = 3, 64, 4000


@dataclass(frozen=True)
class Atom:
    """The argument `x`, or a function of a form; `clip` has bounds."""

    name: str
    of: tuple[tuple[Monomial, float], ...] = ()
    low: float = -math.inf
    high: float = math.inf


#: A product of atoms in order.
Monomial = tuple[Atom, ...]
#: A sum: the coefficient of each monomial, none of them zero.
Form = Mapping[Monomial, float]

_X: Form = {(Atom("x"),): 1.0}
_ONE: Form = {(): 1.0}


def find(graph: Graph, var: Any) -> tuple[str, list[Node]] | None:
    """Return the longest activation that alone reads `var`, with its operators in order."""
    forms: dict[Any, Form] = {var: _X}
    inside: list[Node] = []
    found = None
    while len(inside) < _MAX_OPERATORS:
        following = _next(graph, forms, inside)
        if following is None:
            break
        node, form = following
        inside.append(node)
        forms[node.var] = form
        if _closed(graph, forms, inside):
            name = _named(form)
            found = (name, list(inside)) if name else found
    return found


def _next(graph: Graph, forms: Mapping[Any, Form], inside: list[Node]) -> tuple[Node, Form] | None:
    """Return the next operator that reads nothing but known forms and constants, with its form."""
    shape = extents(next(iter(forms)))
    for user in (user for var in forms for user in graph.users.get(var, [])):
        if user.op not in _OPERATORS or extents(user.var) != shape or user in inside:
            continue
        args = [_form(arg, forms) for arg in user.args]
        form = None if any(arg is None for arg in args) else _OPERATORS[user.op](*args)
        if form is not None and len(repr(form)) <= _MAX_TEXT:
            return user, form
    return None


def _form(arg: Any, forms: Mapping[Any, Form]) -> Form | None:
    if isinstance(arg, relax.Var):
        return forms.get(arg)
    constant = constant_of(arg)
    if constant is not None:
        return _leaf(float(constant.reshape(-1)[0])) if constant.size == 1 else None
    return _leaf(float(getattr(arg, "value", arg)))  # a bound of a clip


def _closed(graph: Graph, forms: Mapping[Any, Form], inside: list[Node]) -> bool:
    """Whether nothing else reads any of the values but the last."""
    *before, _ = forms
    return all(
        all(user in inside for user in graph.users.get(var, [])) and not graph.is_result(var)
        for var in before
    )


def _named(form: Form) -> str | None:
    return next((name for name, known in _ACTIVATIONS.items() if _same(form, known)), None)


def _same(form: Form, known: Form) -> bool:
    """Whether each monomial of the one is one of the other, up to the rounding of constants."""
    left = dict(known)
    for monomial, value in form.items():
        equal = next((one for one in left if _alike(monomial, one)), None)
        if equal is None or not _near(value, left.pop(equal)):
            return False
    return not left


def _alike(monomial: Monomial, other: Monomial) -> bool:
    return len(monomial) == len(other) and all(
        one.name == two.name
        and _near(one.low, two.low)
        and _near(one.high, two.high)
        and _same(dict(one.of), dict(two.of))
        for one, two in zip(monomial, other, strict=True)
    )


def _near(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_FP32, abs_tol=0.0)


def _leaf(value: float) -> Form:
    """Return a constant, in full precision if it is a known one with few digits."""
    for known in _ROUNDED:
        near = math.isclose(abs(value), known, rel_tol=_FEW_DIGITS)
        if near and any(_near(abs(value), round(known, places)) for places in _DECIMALS):
            value = math.copysign(known, value)
    return _constant(value)


def _constant(value: float) -> Form:
    return {(): value} if value else {}


def _number(form: Form) -> float | None:
    """Return the value of a form without atoms."""
    return None if set(form) - {()} else form.get((), 0.0)


def _add(form: Form, other: Form) -> Form:
    total = dict(form)
    for monomial, value in other.items():
        before = total.get(monomial, 0.0)
        total[monomial] = before + value
        if abs(total[monomial]) <= _CANCELLED * abs(value):
            del total[monomial]
    return total


def _scaled(form: Form, factor: float) -> Form:
    return {monomial: value * factor for monomial, value in form.items()} if factor else {}


def _multiply(form: Form, other: Form) -> Form | None:
    if len(form) * len(other) > _MAX_TERMS:
        return None
    product: Form = {}
    for one, value in form.items():
        for two, factor in other.items():
            product = _add(product, {tuple(sorted(one + two, key=repr)): value * factor})
    return product if all(map(math.isfinite, product.values())) else None


def _divide(form: Form, other: Form) -> Form | None:
    divisor = _number(other)
    if divisor is None:
        inverse = _reciprocal(other)
        return None if inverse is None else _multiply(form, inverse)
    return _scaled(form, 1.0 / divisor) if divisor and math.isfinite(divisor) else None


def _reciprocal(form: Form) -> Form | None:
    """Return 1 / (a + b exp(u)) for positive a and b."""
    one, rest = form.get((), 0.0), [term for term in form.items() if term[0]]
    if len(rest) != 1 or one <= 0.0:
        return None
    (monomial, factor), *_ = rest
    if [atom.name for atom in monomial] != ["exp"] or factor <= 0.0:
        return None
    exponent = _add(dict(monomial[0].of), _constant(math.log(factor / one)))
    return _scaled(_sigmoid(_scaled(exponent, -1.0)), 1.0 / one)


def _power(form: Form, exponent: Form) -> Form | None:
    number = _number(exponent)
    if number is None or number not in range(1, _MAX_POWER + 1):
        return None
    power: Form | None = form
    for _ in range(int(number) - 1):
        power = None if power is None else _multiply(power, form)
    return power


def _of(name: str, form: Form, low: float = -math.inf, high: float = math.inf) -> Form:
    """Return the function `name` of a form."""
    return {(Atom(name, tuple(sorted(form.items(), key=repr)), low, high),): 1.0}


def _negative(form: Form) -> bool:
    """Whether the first coefficient is negative, which one of u and -u has."""
    return min(form.items(), key=repr)[1] < 0.0 if form else False


def _sigmoid(form: Form) -> Form:
    if _negative(form):
        return _add(_ONE, _scaled(_sigmoid(_scaled(form, -1.0)), -1.0))
    return _of("sigmoid", form)


def _erf(form: Form) -> Form:
    if _negative(form):
        return _scaled(_erf(_scaled(form, -1.0)), -1.0)
    return _of("erf", form)


def _tanh(form: Form) -> Form:
    return _add(_scaled(_sigmoid(_scaled(form, 2.0)), 2.0), _scaled(_ONE, -1.0))


def _maximum(form: Form, other: Form) -> Form | None:
    return _bounded(form, other, lambda bound: (bound, math.inf))


def _minimum(form: Form, other: Form) -> Form | None:
    return _bounded(form, other, lambda bound: (-math.inf, bound))


def _bounded(
    form: Form, other: Form, limits: Callable[[float], tuple[float, float]]
) -> Form | None:
    for one, two in ((form, other), (other, form)):
        bound = _number(two)
        if bound is not None:
            return _clipped(one, *limits(bound))
    return None


def _clip(form: Form, low: Form, high: Form) -> Form | None:
    bounds = _number(low), _number(high)
    return None if bounds[0] is None or bounds[1] is None else _clipped(form, bounds[0], bounds[1])


def _clipped(form: Form, low: float, high: float) -> Form | None:
    """Clip the form without its constant and with the first coefficient 1; see above."""
    offset, terms = form.get((), 0.0), {key: value for key, value in form.items() if key}
    if not terms or not low < high:  # also a bound that is not a number
        return None
    factor = min(terms.items(), key=repr)[1]
    limits = sorted((bound - offset) / factor for bound in (low, high))
    inner = _scaled(terms, 1.0 / factor)
    (monomial, *others) = inner
    if not others and [atom.name for atom in monomial] == ["clip"]:
        (atom,) = monomial
        limits = [min(max(bound, limits[0]), limits[1]) for bound in (atom.low, atom.high)]
        inner = dict(atom.of)
        if not limits[0] < limits[1]:
            return None
    if limits != [-math.inf, math.inf]:
        inner = _of("clip", inner, *limits)
    return _add(_scaled(inner, factor), _constant(offset))


@dataclass(frozen=True)
class _Symbol:
    """A form as the argument of a definition; without one where the definition has none."""

    form: Form | None

    def __add__(self, other: Any) -> _Symbol:
        return _applied("add", self, other)

    def __mul__(self, other: Any) -> _Symbol:
        return _applied("multiply", self, other)

    def __truediv__(self, other: Any) -> _Symbol:
        return _applied("divide", self, other)

    def __rtruediv__(self, other: Any) -> _Symbol:
        return _applied("divide", other, self)

    def __pow__(self, other: Any) -> _Symbol:
        return _applied("power", self, other)

    def __neg__(self) -> _Symbol:
        return _applied("negative", self)

    __radd__, __rmul__ = __add__, __mul__


def _applied(operator: str, *args: Any) -> _Symbol:
    forms = [arg.form if isinstance(arg, _Symbol) else _constant(arg) for arg in args]
    return _Symbol(None if None in forms else _OPERATORS[operator](*forms))


def _defined(name: str, form: Form) -> Form | None:
    """Return the form of an activation of a form, by its definition."""
    symbol: _Symbol = DEFINITIONS[name](_FUNCTIONS, _Symbol(form))
    return symbol.form


#: The form of each operator's answer, None if it has none, by those of its arguments.
_OPERATORS: Mapping[str, Callable[..., Form | None]] = {
    "add": _add,
    "subtract": lambda form, other: _add(form, _scaled(other, -1.0)),
    "multiply": _multiply,
    "divide": _divide,
    "power": _power,
    "maximum": _maximum,
    "minimum": _minimum,
    "clip": _clip,
    "negative": lambda form: _scaled(form, -1.0),
    "exp": lambda form: _of("exp", form),
    "tanh": _tanh,
    "erf": _erf,
    "sigmoid": _sigmoid,
    **{f"nn.{name}": partial(_defined, name) for name in ("relu", "relu6", "silu")},
    **{f"nn.{name}": partial(_defined, name) for name in ("gelu", "gelu_tanh")},
}
#: Functions that definitions call
_FUNCTIONS = SimpleNamespace(
    **{name: partial(_applied, name) for name in ("exp", "tanh", "erf", "maximum", "clip")}
)
#: The form of each activation's definition.
_ACTIVATIONS: Mapping[str, Form] = {
    name: form for name in DEFINITIONS if (form := _defined(name, _X)) is not None
}

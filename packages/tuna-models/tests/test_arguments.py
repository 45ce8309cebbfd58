"""Inputs of models as a command line has them: what is read, and what is refused in a sentence."""

from __future__ import annotations

import pytest

from tuna.errors import BadInput
from tuna_models import arguments

MANY = "9" * 5000


@pytest.mark.parametrize(
    "text",
    ["x=1,3,224,224:float32", "x=n,128:int64", "p.0.1=2,3:float32", "s=n,4:shape", "x=:float32"],
)
def test_an_argument_is_written_as_it_is_read(text: str) -> None:
    assert str(arguments.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "not of the form"),
        ("x=1", "not of the form"),
        ("x.a=1:float32", "not of the form"),
        (f"x.{MANY}=1:float32", "not of the form"),
        (f"x{'.0' * 100}=1:float32", "not of the form"),
        ("x=1:float", "unknown type 'float'"),
        ("x=1,-2:float32", "extent '-2'"),
        (f"x={MANY}:float32", "has the extent '9"),
        (f"x={'1,' * 16}1:float32", "more than 16 extents"),
    ],
)
def test_what_is_no_argument_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        arguments.parse(text)


def test_extents_are_combined() -> None:
    given = [arguments.parse("x=n,m:float32")]
    assert arguments.sweep(given, ["n=1,2", "m=3"]) == [{"n": 1, "m": 3}, {"n": 2, "m": 3}]
    assert arguments.sweep(given, ["n=1", "m=3", "n=2"]) == arguments.sweep(given, ["n=1,2", "m=3"])
    assert arguments.sweep([arguments.parse("x=3:float32")], []) == [{}]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "extent a has no value"),
        (["a=1", "b=1", "c=1", "d=1"], "No input has the open extent d"),
        (["a=1,x"], "not of the form"),
        (["a=²"], "not of the form"),
        ([f"a={MANY}"], "not of the form"),
        ([f"{name}={','.join(['1'] * 1001)}" for name in "abc"], "1003003001 combinations"),
    ],
)
def test_what_is_no_sweep_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        arguments.sweep([arguments.parse("x=a,b,c:float32")], texts)


@pytest.mark.parametrize(
    "texts",
    [
        ["p.0=1:float32", "p.2=1:float32"],
        ["p=1:float32", "p.0=1:float32"],
        ["x=1:float32", "x=2:float32"],
    ],
)
def test_a_gap_in_a_tuple_is_refused(texts: list[str]) -> None:
    with pytest.raises(BadInput, match="is not one tensor, nor a tuple"):
        arguments.tree([arguments.parse(text) for text in texts], str)

"""What a request may ask for, and how a wrong wish is answered."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tuna.common.messages import first_fault
from tuna_serve.requests.asked import Asked


@pytest.mark.parametrize("name", ["", "a;b", "x" * 101])
def test_a_bad_name_is_answered_in_words(name: str) -> None:
    with pytest.raises(ValidationError) as error:
        Asked.model_validate({"name": name})
    said = first_fault(error.value.errors())
    assert "a name has 1 to 100 letters, digits, spaces" in said
    assert "^" not in said


def test_a_name_is_stripped() -> None:
    assert Asked(name=" resnet 18/a+b:c ").name == "resnet 18/a+b:c"

"""For tests of a kind of config: `registered` makes it known for a while, `KindContract` holds it
to what Tuna relies on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields

import numpy as np

from tuna.configs import (
    KINDS,
    Config,
    ConfigKind,
    from_json,
    from_json_text,
    parse_lines,
    read_line,
)
from tuna.libraries import reference


def registered(kind: ConfigKind) -> AbstractContextManager[None]:
    """Have `kind` in this process as if its package were installed."""
    return KINDS.adding(kind.name, kind)


class KindContract:
    """Properties of every kind; a test class inherits from it and gives `kind` and `examples`.

    The kind must be installed, or `registered` by a fixture that the class uses.
    """

    kind: ConfigKind
    #: configs that all differ; the first ones small, because the reference computes them
    examples: Sequence[Config]
    #: keys of the first examples, as databases have them already; a change of these loses every
    #: stored result
    keys: Sequence[str] = ()
    #: number of examples, from the first, that the reference computes, if the kind has a reference
    referenced: int = 2

    def test_it_is_found_by_its_name(self) -> None:
        """`KINDS` has it, and its configs say so."""
        assert KINDS.get(self.kind.name).config is self.kind.config
        assert len(self.examples) >= 2
        for config in self.examples:
            assert type(config) is self.kind.config
            assert config.kind == self.kind.name

    def test_the_json_form_leads_back(self) -> None:
        """A real JSON text gives an equal config with the same key."""
        for config in self.examples:
            again = from_json(json.loads(json.dumps(config.to_json())))
            assert again == config
            assert hash(again) == hash(config)
            assert (again.key, again.json_text()) == (config.key, config.json_text())
            assert from_json_text(config.json_text()) == config
            assert list(config.to_json()) == ["kind", *config.stated_fields()]
            assert {field.name for field in fields(config)} - set(config.stated_fields()) <= set(
                config.later_fields
            )

    def test_its_text_is_one_line_that_leads_back(self) -> None:
        """The driver command or the JSON text, alone and in a file of layers."""
        for config in self.examples:
            assert config.text().splitlines() == [config.text()]
            assert list(read_line(config.text())) == [config]
        parsed = parse_lines(
            [line for config in self.examples for line in (config.text(), config.json_text())],
            "lines",
        )
        assert parsed.configs == tuple(self.examples)
        assert parsed.rejections == ()

    def test_keys_tell_configs_apart_and_stay(self) -> None:
        """The key is the SHA-256 of the canonical text, which names the fields of the JSON; known
        keys never change."""
        assert len({config.key for config in self.examples}) == len(self.examples)
        for config in self.examples:
            assert config.key == hashlib.sha256(config.canonical().encode()).hexdigest()
            assert all(name in config.canonical() for name in config.stated_fields())
        assert [config.key for config in self.examples][: len(self.keys)] == list(self.keys)

    def test_people_can_read_it(self) -> None:
        """Labels fit into a column and a line."""
        for config in self.examples:
            assert 0 < len(config.label) <= 255
            assert config.label.isprintable()

    def test_its_work_is_counted(self) -> None:
        """FLOPs are a positive whole number that SQL can hold."""
        for config in self.examples:
            assert type(config.flops) is int
            assert 0 < config.flops < 2**63

    def test_its_reference_answers(self) -> None:
        """The reference, where there is one, makes the same problem each time, whose own answer is
        right."""
        if not self.kind.reference:
            return
        for config in self.examples[: self.referenced]:
            problem, again, other = (reference.make(config, seed) for seed in (3, 3, 4))
            assert all(
                np.array_equal(a, b) for a, b in zip(problem.inputs, again.inputs, strict=True)
            )
            assert not all(
                np.array_equal(a, b) for a, b in zip(problem.inputs, other.inputs, strict=True)
            )
            assert problem.expected.dtype == np.float64
            assert np.all(np.isfinite(problem.expected))
            blank = problem.blank()
            assert blank.shape == problem.expected.shape
            assert blank.dtype == reference.np_type(problem.answer_type)
            assert not problem.error(blank) <= problem.tolerance, (
                "an unwritten output must be wrong"
            )
            assert problem.error(problem.expected.astype(blank.dtype)) <= problem.tolerance

"""Questions that are answered together."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tuna.errors import BadInput
from tuna_serve.web.batches import Batches, Shared


class Answers:
    """Answers in capitals, a batch at a time when it is let; one text cannot be answered."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], dict[str, Any]]] = []
        self.go_on = threading.Event()

    def __call__(self, texts: list[str], **conditions: Any) -> list[str]:
        self.batches.append((texts, conditions))
        assert self.go_on.wait(30)
        if "bad" in texts:
            raise BadInput("bad: it names no layer")
        return [f"{text.upper()} {conditions['arch']}" for text in texts]


async def _asked(answers: Answers, *questions: tuple[str, str], most: int = 1000) -> list[Any]:
    """Ask one after the other while the first waits for its answer; the last visitor leaves."""
    batches = Batches(answers, most)
    tasks = [asyncio.create_task(batches.ask("first", arch="a"))]
    while not answers.batches:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(batches.ask(text, arch=arch)) for text, arch in questions]
    gone = asyncio.create_task(batches.ask("gone", arch="a"))
    await asyncio.sleep(0.001)
    gone.cancel()
    answers.go_on.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert await batches.ask("later", arch="c") == "LATER c"
    return found


def test_questions_that_come_while_one_is_answered_are_answered_together() -> None:
    answers = Answers()
    asked = ("x", "a"), ("y", "a"), ("x", "b"), ("z", "a")
    found = asyncio.run(_asked(answers, *asked))
    assert found == ["FIRST a", "X a", "Y a", "X b", "Z a"]
    assert [texts for texts, _ in answers.batches] == [
        *(["first"], ["x", "y", "z", "gone"], ["x"], ["later"])
    ]


def test_a_question_that_has_no_answer_fails_alone() -> None:
    found = asyncio.run(_asked(Answers(), ("x", "a"), ("bad", "a"), ("y", "a")))
    assert [found[place] for place in (0, 1, 3)] == ["FIRST a", "X a", "Y a"]
    assert isinstance(found[2], BadInput)


@pytest.mark.parametrize("most", [1, 3])
def test_a_batch_has_a_bound(most: int) -> None:
    answers = Answers()
    found = asyncio.run(_asked(answers, *(((str(one), "a")) for one in range(8)), most=most))
    assert found[1:] == [f"{one} a" for one in range(8)]
    assert max(len(texts) for texts, _ in answers.batches) == most


def test_who_asks_while_the_same_is_read_gets_what_was_read_after() -> None:
    """So nobody misses what it has written itself; who asks for something else does not wait."""
    reads, go_on = list[int](), threading.Event()

    def read() -> int:
        reads.append(len(reads))
        assert go_on.wait(30)
        return reads[-1]

    async def ask() -> list[int]:
        shared = Shared()
        first = asyncio.create_task(shared.ask("same", read))
        while not reads:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(shared.ask("same", read)) for _ in range(50)]
        assert await shared.ask("other", lambda: 7) == 7
        go_on.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(ask()) == [0, *[1] * 50]

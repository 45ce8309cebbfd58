"""Batches of questions: those that come while a batch is answered are the next one, so that many at
a time cost one thread and one query, not one each. So do those who ask the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from anyio import to_thread

#: Visitors who get one answer.
_MAX_SHARING = 1000
_Asked = list[tuple[str, asyncio.Future[Any]]]


class Batches:
    """Answers questions under the same conditions together."""

    def __init__(self, answer: Callable[..., Sequence[Any]], most: int) -> None:
        """`answer`: returns an answer for each of up to `most` texts, with the conditions as
        keywords; called in a thread."""
        self._answer, self._most = answer, most
        self._waiting: dict[tuple[tuple[str, Any], ...], _Asked] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def are_over(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._waiting and (self._task is None or self._task.done())

    async def ask(self, text: str, **conditions: Any) -> Any:
        """Return the answer for one text; raises what `answer` raises for it."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tuple(conditions.items()), []).append((text, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all(), name="batches of questions")
        return await answer

    async def _answer_all(self) -> None:
        while self._waiting:
            conditions = next(iter(self._waiting))
            asked = self._waiting.pop(conditions)
            for first in range(0, len(asked), self._most):
                await self._answer_some(asked[first : first + self._most], dict(conditions))

    async def _answer_some(self, asked: _Asked, conditions: dict[str, Any]) -> None:
        texts = [text for text, _ in asked]
        try:
            found = await to_thread.run_sync(lambda: self._answer(texts, **conditions))
        except Exception as error:
            if len(asked) > 1:  # it is about one of them
                for one in asked:
                    await self._answer_some([one], conditions)
            elif not asked[0][1].done():
                asked[0][1].set_exception(error)
            return
        for (_, answer), value in zip(asked, found, strict=True):
            if not answer.done():  # its visitor has gone
                answer.set_result(value)


class Shared:
    """Answers that do not depend on who asks: those who ask the same while it is read for another
    get the next one, which was begun after they asked, together."""

    def __init__(self) -> None:
        self._batches: dict[str, Batches] = {}

    async def ask(self, key: str, read: Callable[[], Any]) -> Any:
        """Return what `read` returns, called in a thread for all who ask with this key; raises what
        it raises."""
        batches = self._batches.get(key)
        if batches is None or batches.are_over:
            batches = Batches(lambda asked: [read()] * len(asked), _MAX_SHARING)
            self._batches = {k: one for k, one in self._batches.items() if not one.are_over}
            self._batches[key] = batches
        return await batches.ask("")

"""Answers to `/v1/select` that were given before, by the bytes that were asked.

The same bytes get the same answer as long as the same model answers. Finding it that way costs a fifth of parsing the
question again, and most questions of a fleet are old ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewise.dispatch.decision import Decision
from tilewise.dispatch.selector import Selector
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.service.selectors import Selectors

PATH = "/v1/select"
MAX_ANSWERS = 8192
MAX_QUESTION_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and for how long it holds: until another model is loaded."""

    messages: tuple[Message, Message]
    selector: Selector
    model_id: str | None
    loaded: int  # number of the load, so that a model that was away and came back is asked again
    shape: spec.Shape
    decision: Decision


class Memory:
    """The answers of one app."""

    def __init__(self, selectors: Selectors) -> None:
        self.selectors = selectors
        self._answers: dict[bytes, Answer] = {}

    def find(self, question: bytes) -> Answer | None:
        """The answer that holds, or None."""
        answer = self._answers.get(question)
        if answer is None or answer.loaded != self.selectors.loads or answer.model_id != answer.selector.model_id:
            return None
        return answer

    def keep(
        self, question: bytes, selector: Selector, loads: int, shape: spec.Shape, decision: Decision, response: Any
    ) -> None:
        """Remember an answer that was made while `loads` models had been loaded."""
        if len(question) > MAX_QUESTION_BYTES or decision.model_id != selector.model_id:
            return
        if len(self._answers) >= MAX_ANSWERS:  # the older half goes
            self._answers = dict(islice(self._answers.items(), MAX_ANSWERS // 2, None))
        messages: tuple[Message, Message] = (
            {"type": "http.response.start", "status": 200, "headers": response.raw_headers},
            {"type": "http.response.body", "body": response.body},
        )
        self._answers[question] = Answer(messages, selector, decision.model_id, loads, shape, decision)


class _Route:
    path = PATH


class Remember:
    """Middleware that answers from memory where it can. Behind the guard, so that all of its rules hold."""

    def __init__(self, app: ASGIApp, memory: Memory) -> None:
        self._app, self._memory = app, memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            first = await receive()
        except HTTPException as error:  # of the guard, for a body that is late or too large: the app makes the answer
            return await self._app(scope, _raising(error), send)
        question = first.get("body", b"")
        if first["type"] == "http.request" and not first.get("more_body") and _is_json(scope):
            answer = self._memory.find(question)
            if answer is not None:
                scope["route"] = _Route
                self._memory.selectors.note(answer.selector.arch.name, answer.shape, answer.decision)
                await send(answer.messages[0])
                return await send(answer.messages[1])
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return first

        await self._app(scope, again, send)


def _raising(error: HTTPException) -> Receive:
    async def receive() -> Message:
        raise error

    return receive


def _is_json(scope: Scope) -> bool:
    return any(name == b"content-type" and value == b"application/json" for name, value in scope["headers"])

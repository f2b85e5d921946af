"""What a client has asked in one session, and how a new request continues it.

A request repeats the whole chat. Its answers are found again by the ids that they were given, or by
their text; what a client dropped (thinking) or wrote otherwise (arguments) makes no difference. What
follows the last of them is appended to the tokens that were sampled. A chat that was edited, or is
another agent's, begins a branch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.episode.answer import ParsedAnswer
from headrace.episode.chat import Message, Tools, json_rule, normal
from headrace.episode.session import Addition, Session
from headrace.episode.tree import context, place_before
from headrace.errors import ChatError, MissingExtraError
from headrace.serve.ask import Ask, RefusedError
from headrace.types import FinishReason, Sampling, Turn

MOST_AT_ONCE = 256  # requests of one session
ID_CHARS = 9  # of a tool call: some templates refuse other lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer to a request."""

    id: str
    answer: ParsedAnswer
    call_ids: tuple[str, ...]
    text: str  # as it was sampled, without its end
    finish: FinishReason
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]

    @property
    def message(self) -> dict[str, Any]:
        return self.answer.message(self.call_ids)


@dataclass(eq=False)
class Node:
    """An answer in the conversation, after `new` messages that followed the answer before it."""

    new: tuple[Any, ...] = ()  # as `normal` writes them
    said: tuple[Any, ...] = ()
    ids: frozenset[str] = frozenset()
    chat: tuple[Message, ...] = ()  # all messages, and the answer
    tools: Tools = None
    place: int = -1  # of its last token
    answered_s: float = 0.0
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of an episode; 0 is none. Example: Limits(max_turns=32)."""

    max_turns: int = 0
    max_tokens: int = 0


class Conversation:
    """The requests of one session. `ended_by` is the limit that it has reached, if any."""

    def __init__(self, session: Session, limits: Limits, known: Sequence[Turn] = ()) -> None:
        self.session, self.limits, self.ended_by = session, limits, ""
        self._root, self._closed = Node(), ""
        self._unclaimed = list(known)  # turns of an earlier attempt, not asked for again yet
        self._asked: dict[str, tuple[asyncio.Task[list[Answered]], list[Callable[[], Awaitable[bool]]]]] = {}
        self._responses: dict[str, tuple[tuple[Message, ...], tuple[frozenset[str], ...]]] = {}
        self._going: set[asyncio.Task[list[Answered]]] = set()
        self._num_going = 0  # turns
        self._waiting: AbstractContextManager[None] | None = None  # a span: the client does not wait for us
        self.idle_since_s = session.desk.now()

    # ---- for the episode

    @property
    def is_idle(self) -> bool:
        return not self._going

    @property
    def num_unclaimed(self) -> int:
        return len(self._unclaimed)

    def open(self) -> None:
        """From now on the client may take its time, which is measured."""
        if self.is_idle and self._waiting is None:
            self._idle()

    def end(self, limit: str) -> None:
        """A limit is reached: what comes is refused."""
        self._closed = self.ended_by = limit

    async def close(self, why: str) -> None:
        """Refuse what comes, and wait for what is being sampled."""
        self._closed = self._closed or why
        while self._going:
            await asyncio.wait(self._going)
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None

    # ---- for the endpoint

    async def take(
        self, ask: Ask, *, is_retry: bool = False, is_gone: Callable[[], Awaitable[bool]]
    ) -> asyncio.Task[list[Answered]]:
        """The answers, sampled once even if a client asks again because it got none.

        `is_gone` tells whether the client still waits for this request.
        """
        if ask.digest in self._asked:
            task, clients = self._asked[ask.digest]
            if is_retry or (not task.done() and all([await gone() for gone in clients])):
                clients.append(is_gone)
                return task
        task = self._begin(ask)
        self._asked[ask.digest] = task, [is_gone]
        return task

    def knows(self, ask: Ask) -> bool:
        """Whether a request goes on with this conversation."""
        if ask.digest in self._asked or ask.previous in self._responses:
            return True
        return bool(ask.messages) and self._match(*self._whole(replace(ask, previous="")))[0] is not self._root

    def _begin(self, ask: Ask) -> asyncio.Task[list[Answered]]:
        self._refuse(ask)
        messages, ids = self._whole(ask)
        node, new = self._match(messages, ids)
        addition = self._addition(ask, node, [messages[i] for i in new])
        tokens = self.session.context(addition)
        sampling = self._sampling(ask, len(tokens))
        known = [turn for turn in (self._claim(tokens) for _ in range(ask.n)) if turn is not None]
        place = place_before(self.session.trajectory, known[0].start) if known else self.session.tell(addition)
        if node.place >= 0:
            self._replied(node, [messages[i] for i in new])
        norms = tuple(normal(messages[i]) for i in new)
        chat = (*node.chat, *(messages[i] for i in new))

        async def sampled(i: int) -> Turn:
            own = sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + i) % 2**63)
            try:
                return await self.session.sample(place, own, agent=ask.agent)
            finally:
                self._num_going -= 1

        async def answers() -> list[Answered]:
            found = await asyncio.gather(*map(sampled, range(ask.n - len(known))), return_exceptions=True)
            if failed := [error for error in found if isinstance(error, BaseException)]:
                raise failed[0]
            turns = [*known, *(turn for turn in found if isinstance(turn, Turn))]
            return [self._answered(ask, turn, sampling.stop, node, norms, chat) for turn in turns]

        self._num_going += ask.n - len(known)
        task = asyncio.create_task(answers())
        self._busy(task)
        return task

    def _refuse(self, ask: Ask) -> None:
        session, limit = self.session, self.limits.max_turns
        if self._closed or session.aborted.is_set():
            raise RefusedError(self._closed or "the episode is over", status=410, code="episode_over")
        if len(self._going) >= MOST_AT_ONCE:
            raise RefusedError("too many requests of one session at once", status=429, after_s=1)
        num_turns = len(session.trajectory.turns) - len(self._unclaimed) + self._num_going
        if limit and num_turns + ask.n > limit:
            self.ended_by = f"the episode may have {limit} turns"
            raise RefusedError(self.ended_by, status=410, code="episode_over")
        if others := set(ask.stop_ids) - session.desk.chat.stop_ids:
            raise RefusedError(f"these tokens do not end an answer: {sorted(others)}", param="stop_token_ids")
        if session.order.counted and ask.sampling.get("temperature") == 0:
            raise RefusedError("what is sampled at a temperature of 0 cannot be trained on", param="temperature")

    def _whole(self, ask: Ask) -> tuple[list[Message], list[frozenset[str]]]:
        """All messages that a request means, and their ids."""
        messages: list[Message] = [{"role": "system", "content": ask.instructions}] if ask.instructions else []
        ids = [frozenset[str]()] * len(messages)
        if ask.previous:
            if ask.previous not in self._responses:
                text = f"there is no response '{ask.previous}' in this session"
                raise RefusedError(text, param="previous_response_id", code="previous_response_not_found")
            earlier = self._responses[ask.previous]
            messages, ids = [*messages, *earlier[0]], [*ids, *earlier[1]]
        return [*messages, *ask.messages], [*ids, *ask.ids]

    def remember(self, response: str, ask: Ask, answered: Answered) -> None:
        """What a later request with this `previous_response_id` goes on from."""
        messages, ids = self._whole(replace(ask, instructions=""))
        self._responses[response] = (*messages, answered.message), (*ids, _ids(answered))

    def _match(self, messages: Sequence[Message], ids: Sequence[frozenset[str]]) -> tuple[Node, list[int]]:
        """The last answer of this conversation that the messages hold, and which messages follow it."""
        node, new = self._root, list[int]()
        norms = [normal(message) for message in messages]
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                new.append(i)
                continue
            before = tuple(norms[k] for k in new)
            near = [child for child in reversed(node.children) if child.new == before]
            found = [child for child in near if child.ids & ids[i]] or [c for c in near if c.said == norms[i]]
            if found:
                node, new = found[0], []
            elif not node.ids & ids[i]:  # a client may put a call's result between two calls of one answer
                new.append(i)
        return node, new

    def _addition(self, ask: Ask, node: Node, new: Sequence[Message]) -> Addition:
        session = self.session
        if not ask.messages:
            prompt = session.desk.chat.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
            if max(prompt) >= session.desk.chat.vocab_size:
                raise RefusedError(f"there is no token {max(prompt)}", param="token_ids")
            return session.beyond(np.array(prompt, np.int32))
        try:
            appends = node.place >= 0 and not any(m["role"] == "assistant" for m in new) and new
            if appends and ask.tools == node.tools:
                turn = self._turn(node.place)
                return session.next(turn, node.chat[:-1], node.chat[-1], new, ask.tools)
            return session.first([*node.chat, *new], ask.tools)
        except ChatError as error:
            raise RefusedError(str(error), param="messages") from error

    def _sampling(self, ask: Ask, num_prompt: int) -> Sampling:
        session = self.session
        most = min(self.limits.max_tokens or session.desk.max_context, session.desk.max_context)
        if num_prompt >= most:
            self.ended_by = f"this model's maximum context length is {most} tokens, and the request has {num_prompt}"
            raise RefusedError(self.ended_by, param="messages", code="context_length_exceeded")
        sampling = replace(session.sampling, **ask.sampling, grammar=self._grammar(ask))
        num_new = min(sampling.max_new_tokens, session.sampling.max_new_tokens, most - num_prompt)
        return replace(sampling, max_new_tokens=num_new)

    def _grammar(self, ask: Ask) -> str:
        """What an answer must look like; checked here, as an engine cannot refuse."""
        if ask.schema is None and ask.must_call is None:
            return ""
        chat = self.session.desk.chat
        try:
            if ask.must_call is not None:
                grammar = chat.call_grammar(ask.tools, ask.must_call)
            else:
                grammar = json_rule("start", ask.schema)
            chat.check_grammar(grammar)
        except (ChatError, MissingExtraError) as error:
            param = "response_format" if ask.must_call is None else "tool_choice"
            raise RefusedError(str(error), param=param) from error
        return grammar

    def _claim(self, tokens: Any) -> Turn | None:
        """A turn of an earlier attempt that was sampled after the same tokens."""
        t = self.session.trajectory
        for turn in self._unclaimed:
            if np.array_equal(context(t, place_before(t, turn.start))[0], tokens):
                self._unclaimed.remove(turn)
                return turn
        return None

    def _answered(
        self, ask: Ask, turn: Turn, stop: Sequence[str], node: Node, new: tuple[Any, ...], chat: tuple[Message, ...]
    ) -> Answered:
        session, t = self.session, self.session.trajectory
        prompt = context(t, place_before(t, turn.start))[0].tolist()
        sampled = session.sampled_ids(turn).tolist()
        text = _cut(session.desk.chat.text(sampled), stop if turn.finish is FinishReason.STOP else ())
        answer = ParsedAnswer(text)
        if ask.messages:
            read = session.desk.chat.parse(sampled, prompt, ask.tools)
            if not read.tool_calls or (ask.may_call and ask.tools):
                answer = read
            if turn.finish is FinishReason.STOP:
                answer = replace(answer, content=_cut(answer.content, stop), reasoning=_cut(answer.reasoning, stop))
        base = f"{session.order.serial} {session.order.prompt.id} {session.index} {turn.start}"
        calls = [_hex(f"{base} {i}")[:ID_CHARS] for i in range(len(answer.tool_calls))]
        answered = Answered(
            id=_hex(base)[:24],
            answer=answer,
            call_ids=tuple(calls),
            text=text,
            finish=turn.finish,
            prompt_ids=prompt,
            token_ids=sampled,
            logprobs=t.logprobs[turn.start : turn.end].tolist(),
        )
        if ask.messages:
            child = Node(new, normal(answered.message), _ids(answered), (*chat, answered.message), ask.tools)
            child.place, child.answered_s = turn.end - 1, session.desk.now()
            node.children.append(child)
        return answered

    def _turn(self, place: int) -> Turn:
        return next(turn for turn in self.session.trajectory.turns if turn.end - 1 == place)

    def _replied(self, node: Node, new: Sequence[Message]) -> None:
        """Book what followed an answer, and how long it took, with its turn."""
        turn = self._turn(node.place)
        if not turn.replies:
            seconds = self.session.desk.now() - node.answered_s
            replies = tuple(str(message["content"]) for message in new)
            self.session.replace_turn(turn, replace(turn, replies=replies, environment_s=seconds))

    def _busy(self, task: asyncio.Task[list[Answered]]) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None
        self._going.add(task)

        def done(task: asyncio.Task[list[Answered]]) -> None:
            self._going.discard(task)
            if not task.cancelled():
                task.exception()  # the client may be gone
            if not self._going:
                self._idle()

        task.add_done_callback(done)

    def _idle(self) -> None:
        self.idle_since_s = self.session.desk.now()
        self._waiting = self.session.desk.span("environment")
        self._waiting.__enter__()


def _ids(answered: Answered) -> frozenset[str]:
    return frozenset({*answered.call_ids, f"msg_{answered.id}", f"rs_{answered.id}"})


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cut(text: str, stop: Sequence[str]) -> str:
    """Up to the first of the texts in `stop`."""
    return text[: min((text.find(part) for part in stop if part in text), default=len(text))]

"""What a client has asked in one session, and how a new request continues it.

A request repeats the whole chat. Its answers are found again by the ids that they were given, or by
their text; what a client dropped (thinking) or wrote otherwise (arguments) makes no difference.
What follows the last of them is appended to the tokens that were sampled. A chat that was edited,
or is another agent's, begins a branch.
"""

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.episode.answer import ParsedAnswer, Tools
from headrace.episode.chat import HEADER_TOKENS, Message, json_rule, normal
from headrace.episode.session import Addition, Session
from headrace.episode.tree import context, place_before
from headrace.errors import ChatError, MissingExtraError
from headrace.serve.ask import Ask, RefusedError
from headrace.types import FinishReason, IntArray, Sampling, Turn

MOST_AT_ONCE = 256  # requests of one session
ID_CHARS = 9  # of a tool call: some templates refuse other lengths
Parts = dict[str, float]  # of a reward
IsGone = Callable[[], Awaitable[bool]]  # whether a client does not wait any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer to a request."""

    id: str
    answer: ParsedAnswer
    text: str  # as it was sampled, without its end
    finish: FinishReason
    prompt_ids: IntArray
    token_ids: list[int]
    logprobs: list[float]


Answering = asyncio.Task[list[Answered]]


@dataclass(eq=False, kw_only=True)
class Node:
    """An answer in the conversation, after `new` messages that followed the answer before it."""

    new: Sequence[Any] = ()  # as `normal` writes them
    said: Sequence[Any] = ()
    ids: frozenset[str] = frozenset()
    chat: tuple[Message, ...] = ()  # all messages, and the answer
    instructed: bool = False  # the first of them is the request's instructions
    tools: Tools = None
    turn: Turn | None = None  # as it was last booked
    answered_s: float = 0.0
    children: "list[Node]" = field(default_factory=list)


class Conversation:
    """The requests of one session; of its limits 0 is none. `ended_by` is the limit that it has reached, if any.

    An agent knows it by `id`, and may report its `reward`. `fresh_seeds`: for requests without one.
    """

    def __init__(self, session: Session, *, max_turns: int = 0, max_tokens: int = 0, fresh_seeds: bool = False) -> None:
        self.id, self.session, self.ended_by = secrets.token_hex(12), session, ""
        self.reward: asyncio.Future[Parts] = asyncio.get_running_loop().create_future()
        self._max_turns, self._max_tokens = max_turns, max_tokens or session.desk.max_context
        self._root, self._closed, self._fresh_seeds = Node(), "", fresh_seeds
        self.unclaimed = list(session.trajectory.turns)  # of an earlier attempt, not asked for yet
        self._asked: dict[str, tuple[Answering, list[IsGone]]] = {}
        self._nodes: dict[str, Node] = {}  # by the ids of responses
        self._going: set[Answering] = set()
        self._num_going = 0  # turns
        self._waiting = ExitStack()  # a span, while the client does not wait for us
        self.idle_since_s = session.desk.now()

    # ---- for the episode

    @property
    def is_idle(self) -> bool:
        return not self._going

    def idle(self) -> None:
        """From now on the client takes its time, which is measured."""
        if self.is_idle:
            self._waiting.close()
            self.idle_since_s = self.session.desk.now()
            self._waiting.enter_context(self.session.desk.span("environment"))

    def end(self, limit: str) -> None:
        """A limit is reached: what comes is refused."""
        self._closed = self.ended_by = limit

    def give_up(self) -> None:
        """Wait for no turn that is being sampled."""
        for task in self._going:
            task.cancel()

    async def close(self, why: str) -> None:
        self._closed = self._closed or why
        while self._going:
            await asyncio.wait(self._going)
        self._waiting.close()

    # ---- for the endpoint

    async def take(self, ask: Ask, *, is_retry: bool = False, is_gone: IsGone) -> Answering:
        """The answers, sampled once even if a client asks again because it got none.

        `is_gone` tells whether the client still waits for this request.
        """
        if ask.digest in self._asked:
            task, clients = self._asked[ask.digest]
            if is_retry or (not task.done() and all([await gone() for gone in clients])):
                clients.append(is_gone)
                return task
            self._asked.pop(ask.digest, None)  # the retry of a request that is refused does not get this answer
        task = self._begin(ask)
        self._asked[ask.digest] = task, [is_gone]
        return task

    def knows(self, ask: Ask, *, is_retry: bool) -> bool:
        """Whether the request goes on here. An equal one that is no retry begins another."""
        if ask.previous or (is_retry and ask.digest in self._asked):
            return ask.previous in self._nodes or not ask.previous
        whole = self._whole(ask)
        begins = any(child.new[0] == normal(whole[0]) for child in self._root.children) if whole else False
        return begins and self._match(whole)[0] is not self._root

    def _begin(self, ask: Ask) -> Answering:
        self._refuse(ask)
        self.ended_by = ""  # by a request that was refused; the agent goes on
        node, new = self._match(self._whole(ask))
        addition = self._addition(ask, node, new)
        before, _ = context(self.session.trajectory, addition.after)
        tokens = np.concatenate([before, addition.tokens])
        sampling = self._sampling(ask, len(tokens))
        # turns of an earlier attempt that were sampled after the same tokens
        same = (turn for turn in self.unclaimed if np.array_equal(self.session.prompt_ids(turn), tokens))
        known = list(itertools.islice(same, ask.n))
        self.unclaimed = [turn for turn in self.unclaimed if turn not in known]
        place = place_before(self.session.trajectory, known[0].start) if known else self.session.tell(addition)
        told = [str(message["content"]) for message in new]
        if node.turn and not node.turn.replies:
            took_s = self.session.desk.now() - node.answered_s
            node.turn = replace(node.turn, replies=tuple(told), environment_s=took_s)
            self.session.replace_turn(node.turn)

        async def sampled(i: int) -> Turn:
            own = sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + i) % 2**63)
            try:
                return await self.session.sample(place, own, agent=ask.agent, state="\n".join(told))
            finally:
                self._num_going -= 1

        async def answers() -> list[Answered]:
            count = ask.n - len(known)
            if count == 1:  # as nearly always: no tasks
                found: list[Turn | BaseException] = [await sampled(0)]
            else:
                found = await asyncio.gather(*map(sampled, range(count)), return_exceptions=True)
            if failed := [error for error in found if isinstance(error, BaseException)]:
                raise failed[0]
            turns = [*known, *(turn for turn in found if isinstance(turn, Turn))]
            return [self._answered(ask, turn, sampling.stop, node, new) for turn in turns]

        def done(task: Answering) -> None:
            self._going.discard(task)
            if not task.cancelled():
                task.exception()  # the client may be gone
            self.idle()

        self._num_going += ask.n - len(known)
        self._waiting.close()
        task = asyncio.create_task(answers())
        self._going.add(task)
        task.add_done_callback(done)
        return task

    def _refuse(self, ask: Ask) -> None:
        session, limit = self.session, self._max_turns
        if self._closed or session.aborted.is_set():
            raise RefusedError(self._closed or "the episode is over", status=410, code="episode_over")
        if len(self._going) >= MOST_AT_ONCE:
            raise RefusedError("too many requests of one session at once", status=429, after_s=1)
        num_turns = len(session.trajectory.turns) - len(self.unclaimed) + self._num_going
        if limit and num_turns + ask.n > limit:
            self.ended_by = f"the episode may have {limit} turns"
            raise RefusedError(self.ended_by, status=410, code="episode_over")
        if others := set(ask.stop_ids) - session.desk.chat.stop_ids:
            raise RefusedError(f"these tokens do not end an answer: {sorted(others)}", param="stop_token_ids")
        if session.order.counted and ask.temperature == 0:
            raise RefusedError("what is sampled at a temperature of 0 cannot be trained on", param="temperature")

    def _whole(self, ask: Ask) -> list[Message]:
        messages: list[Message] = [{"role": "system", "content": ask.instructions}] if ask.instructions else []
        if ask.previous:
            if ask.previous not in self._nodes:
                text = f"there is no response '{ask.previous}' in this session"
                raise RefusedError(text, param="previous_response_id", code="previous_response_not_found")
            node = self._nodes[ask.previous]
            messages += node.chat[node.instructed :]
        return [*messages, *ask.messages]

    def _match(self, messages: Sequence[Message]) -> tuple[Node, list[Message]]:
        """The last answer of this conversation that the messages hold, and the messages that follow it."""
        node, new, before = self._root, list[Message](), list[Any]()
        for message in messages:
            ids, is_answer = _ids(message), message["role"] == "assistant"
            near = [child for child in reversed(node.children) if is_answer and child.new == before]
            found = [child for child in near if child.ids & ids]
            said = () if found else normal(message)
            if found := found or [child for child in near if child.said == said]:
                node, new, before = found[0], [], []
            elif not (is_answer and node.ids & ids):  # its results may stand between its calls
                new.append(message)
                before.append(said)
        return node, new

    def _addition(self, ask: Ask, node: Node, new: Sequence[Message]) -> Addition:
        session, chat = self.session, self.session.desk.chat
        if not ask.messages:
            prompt = chat.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
            if max(prompt) >= chat.vocab_size:
                raise RefusedError(f"there is no token {max(prompt)}", param="token_ids")
            return session.beyond(np.array(prompt, np.int32))
        try:
            appends = new and not any(m["role"] == "assistant" for m in new)
            if node.turn and appends and ask.tools == node.tools:
                return session.next(node.turn, node.chat[:-1], node.chat[-1], new, ask.tools)
            return session.first([*node.chat, *new], ask.tools)
        except ChatError as error:
            raise RefusedError(str(error), param="messages") from error

    def _sampling(self, ask: Ask, num_prompt: int) -> Sampling:
        session = self.session
        most = min(self._max_tokens, session.desk.max_context)
        if num_prompt >= most:
            self.ended_by = f"this model's maximum context length is {most} tokens, and the request has {num_prompt}"
            raise RefusedError(self.ended_by, param="messages", code="context_length_exceeded")
        seed = {"seed": secrets.randbits(62)} if self._fresh_seeds else {}
        num_new = min(ask.max_new_tokens or most, session.sampling.max_new_tokens, most - num_prompt)
        own: dict[str, Any] = seed | ask.sampling | {"max_new_tokens": num_new, "grammar": self._grammar(ask)}
        sampling = replace(session.sampling, **own)
        if told := session.desk.refusal(sampling):
            raise RefusedError(told)
        return sampling

    def _grammar(self, ask: Ask) -> str:
        """What an answer must look like; checked here, as an engine cannot refuse."""
        if ask.json_schema is None and not ask.must_call:
            return ""
        chat = self.session.desk.chat
        try:
            grammar = chat.call_grammar(ask.must_call) if ask.must_call else json_rule("start", ask.json_schema)
            chat.grammars.check(grammar)
        except (ChatError, MissingExtraError) as error:
            raise RefusedError(str(error), param="tool_choice" if ask.must_call else "response_format") from error
        return grammar

    def _answered(self, ask: Ask, turn: Turn, stop: Sequence[str], node: Node, new: Sequence[Message]) -> Answered:
        session, prompt = self.session, self.session.prompt_ids(turn)
        sampled = session.sampled_ids(turn).tolist()
        text = _cut(turn.text, stop if turn.finish is FinishReason.STOP else ())
        answer = ParsedAnswer(text)
        if ask.messages:
            read = session.desk.chat.parse(sampled, prompt[-HEADER_TOKENS:].tolist(), ask.tools)
            if not read.tool_calls or (ask.may_call and ask.tools):
                answer = read
            if turn.finish is FinishReason.STOP:
                answer = replace(answer, content=_cut(answer.content, stop), reasoning=_cut(answer.reasoning, stop))
        base = f"{session.order.serial} {session.order.prompt.id} {session.index} {turn.start}"
        calls = [replace(call, id=digest(f"{base} {i}")[:ID_CHARS]) for i, call in enumerate(answer.tool_calls)]
        answered = Answered(
            id=digest(base)[:24],
            answer=replace(answer, tool_calls=tuple(calls)),
            text=text,
            finish=turn.finish,
            prompt_ids=prompt,
            token_ids=sampled,
            logprobs=session.trajectory.logprobs[turn.start : turn.end].tolist(),
        )
        if ask.messages:
            message = answered.answer.message() | {"id": f"msg_{answered.id}"}
            child = Node(
                new=[normal(each) for each in new],
                said=normal(message),
                ids=_ids(message) | {f"rs_{answered.id}"},
                chat=(*node.chat, *new, message),
                instructed=bool(ask.instructions),
                tools=ask.tools,
                turn=turn,
                answered_s=session.desk.now(),
            )
            node.children.append(child)
            self._nodes[f"resp_{answered.id}"] = child
        return answered


def _ids(message: Message) -> frozenset[str]:
    """Those that we may have given to an answer."""
    return frozenset(str(part.get("id")) for part in (message, *(message.get("tool_calls") or ())))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _cut(text: str, stop: Sequence[str]) -> str:
    """Up to the first of the texts in `stop`."""
    return text[: min((text.find(part) for part in stop if part in text), default=len(text))]

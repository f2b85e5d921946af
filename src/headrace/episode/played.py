"""An episode with an environment: it and the policy take turns, until one of them ends it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.episode.answer import ParsedAnswer
from headrace.episode.chat import Message
from headrace.episode.environment import ADVICE, Environment, Environments, Said
from headrace.episode.session import Desk, EpisodeFailedError, Session
from headrace.episode.tree import indices
from headrace.errors import ChatError, ConfigError
from headrace.roles import R
from headrace.types import Example, Outcome, Prompt, Trajectory, Turn


@dataclass(eq=False)
class Player:
    """Plays episodes with environments."""

    environments: Environments
    desk: Desk
    system: str = ""  # a message before every episode, if the environment begins without one
    reward_follows: bool = False  # a reward function adds to what the environment says
    on_note: Callable[[str], None] = lambda text: None
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _num_working: int = field(default=0, init=False)  # environments that are asked for a reply
    _working: ExitStack = field(default_factory=ExitStack, init=False)

    async def prepare(self) -> None:
        """Raises if the environment cannot be loaded, or the chat template cannot serve it."""
        await self.environments.start()
        described = self.environments.described
        proof = self.desk.chat.prove(described.tools or None)
        if described.tools and not proof.calls:
            raise ConfigError(f"episode.environment cannot be played with model.path: {proof}")
        kinds = ["a tool result"] * bool(described.tools) + ["a user message"] * described.takes_text
        if any(kind in proof.rewrites for kind in kinds):
            self.on_note(str(proof))

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await self.environments.close()

    async def play(self, session: Session) -> Outcome:
        return await PlayedEpisode(self, session).play()

    async def worked(self, prompt: Prompt, chat: Sequence[Message]) -> Example:
        """Tokens of the `chat` that follows the environment's first message, and which of them are learned."""
        environment = self.environments.open(f"worked:{prompt.id}", prompt)
        history = self.with_system(await environment.start())
        self.let_go(environment)
        return self.desk.chat.worked(history, chat, list(self.environments.described.tools))

    async def timed(self, session: Session, asked: Awaitable[R]) -> R:
        """One span goes from the first environment that works to the last."""
        if self._num_working == 0:
            self._working.enter_context(self.desk.span("environment"))
        self._num_working += 1
        try:
            return await session.unless_aborted(asked)
        finally:
            self._num_working -= 1
            if self._num_working == 0:
                self._working.close()

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The first messages of an episode, with the system message of `prompts.system`."""
        if not self.system or messages[0].get("role") == "system":
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def let_go(self, environment: Environment) -> None:
        task = asyncio.create_task(environment.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class PlayedEpisode:
    """One episode, from its first message to its reward."""

    def __init__(self, player: Player, session: Session) -> None:
        self.player, self.session = player, session
        self._described = player.environments.described
        self._tools = list(self._described.tools) or None
        self._environment = player.environments.open(session.id, session.order.prompt)
        self._history: list[Message] = []
        self._place = -1  # the last token so far
        self._ended = False  # by the environment

    async def play(self) -> Outcome:
        session, known = self.session, self.session.known
        try:
            begun = await self.player.timed(session, self._environment.start())
            self._history = self.player.with_system(begun)
            self._place = session.tell(session.first(self._history, self._tools))
            answer = await self._repeat(known) if known and known.turns else await self._next_answer()
            while answer is not None and await self._reply(answer):
                answer = await self._next_answer()
            return await self._score()
        except ChatError as error:  # the template refuses how it begins
            raise EpisodeFailedError(str(error)) from error
        finally:
            self.player.let_go(self._environment)

    async def _repeat(self, known: Trajectory) -> ParsedAnswer:
        """Come to where an earlier attempt was, and return its last answer: no turn is sampled again."""
        session, began, log = self.session, known.turns[0].start, []
        if not np.array_equal(known.token_ids[:began], session.trajectory.token_ids):
            raise EpisodeFailedError(f"it began otherwise than before; {ADVICE}")
        session.trajectory = replace(known, id=session.id)
        for turn in known.turns[:-1]:
            answer = self._read(turn)
            if (given := self._given(answer)) is not None:
                log.append((given, turn.replies))
            message = answer.message()
            self._history += [message, *_as_messages(message, turn.replies)]
        if log:
            await self.player.timed(session, self._environment.make_again(log, known.turns[-2].snapshot))
        return self._read(known.turns[-1])

    async def _next_answer(self) -> ParsedAnswer | None:
        """Sample a turn and read it; None if the episode has reached a limit."""
        session, limits, most = self.session, self._described, self.player.desk.max_context
        room = min(limits.max_tokens or most, most) - len(indices(session.trajectory, self._place))
        num_new = min(session.sampling.max_new_tokens, room)
        elapsed_s = self.player.desk.now() - session.trajectory.timing.submitted_s
        too_many = len(session.trajectory.turns) >= limits.max_turns
        if num_new <= 0 or too_many or (limits.max_s and elapsed_s > limits.max_s):
            return None
        sampling = replace(session.sampling, max_new_tokens=num_new)
        return self._read(await session.sample(self._place, sampling, state=self._environment.state))

    def _read(self, turn: Turn) -> ParsedAnswer:
        sampled, prompt = self.session.sampled_ids(turn), self.session.prompt_ids(turn)
        answer = self.player.desk.chat.parse(sampled.tolist(), prompt.tolist(), self._tools)
        if turn.finish.cut and answer.tool_calls:  # else it would learn that it need not end
            return ParsedAnswer(turn.text, answer.reasoning, (), "the answer was cut before its end")
        is_text = not self._tools and (answer.tool_calls or answer.error)  # nothing to call: it is what it says
        return ParsedAnswer(turn.text, answer.reasoning) if is_text else answer

    async def _reply(self, answer: ParsedAnswer) -> bool:
        """Let the environment reply; False if the episode is over."""
        message, turn = answer.message(), self.session.trajectory.turns[-1]
        began_s = self.player.desk.now()
        given = self._given(answer)
        if answer.error:
            replies = (f"error: {answer.error}",) * max(1, len(answer.tool_calls))
            said = Said(replies=replies, done=False)
        elif given is None:
            return False
        else:
            said = await self.player.timed(self.session, self._environment.turn(given))
        told = said.model_dump(include={"replies", "reward", "snapshot"})
        self.session.replace_turn(replace(turn, **told, environment_s=self.player.desk.now() - began_s))
        if said.done:
            self._ended = True
            return False
        new = _as_messages(message, said.replies)
        try:
            addition = self.session.next(turn, self._history, message, new, self._tools)
            self._place = self.session.tell(addition)
        except ChatError:  # it wrote something that the template cannot go on from
            return False
        self._history += [message, *new]
        return True

    def _given(self, answer: ParsedAnswer) -> dict[str, Any] | None:
        """What the environment is asked; None if it is not: an error, or a last word."""
        if answer.error:
            return None
        if answer.tool_calls and self._tools:
            return {"calls": [[call.name, call.arguments] for call in answer.tool_calls]}
        return {"text": answer.content} if self._described.takes_text else None

    async def _score(self) -> Outcome:
        """The reward: what the environment gave for turns, and what it gives for the whole."""
        turns = tuple(replace(turn, snapshot="") for turn in self.session.trajectory.turns)
        if not turns:
            problem = f"the first message has {len(self.session.trajectory.token_ids)} tokens, which leaves no room"
            raise EpisodeFailedError(f"{problem} for a turn (episode.max_tokens)")
        given = [turn.reward for turn in turns if turn.reward is not None]
        parts = {"turns": float(sum(given))} if given else {}
        parts |= await self.player.timed(self.session, self._environment.end())
        # what the policy caused (a limit, a last word) is an end with a reward
        if not parts and not self._described.scores and not self._ended:
            parts = {"turns": 0.0}
        self.session.trajectory = replace(self.session.trajectory, turns=turns)
        if not parts and not self.player.reward_follows:
            told = "raise Done(text, reward=...), or give it a method reward()"
            raise EpisodeFailedError(f"the episode ended without a reward: {told}")
        return self.session.outcome(parts, reward_follows=self.player.reward_follows)


def _as_messages(message: Message, replies: Sequence[str]) -> list[Message]:
    """The replies to an answer: one per tool call, or one to its text."""
    calls = message.get("tool_calls") or ()
    if not calls:
        return [{"role": "user", "content": reply} for reply in replies]
    return [
        {"role": "tool", "content": reply, "name": call["function"]["name"], "tool_call_id": call["id"]}
        for call, reply in zip(calls, replies, strict=False)
    ]

"""Whole runs with environments in seconds: a random chat model of a few thousand weights that says anything."""

from __future__ import annotations

from pathlib import Path

from doubles import tiny_model
from tiny_runs import Workshop

from headrace.config import Config
from headrace.policy.demo import chat_tokenizer

# Any text is an answer to `reply`, so a random model can play. What it replies follows from the text alone.
ENVIRONMENTS = '''
import asyncio, os, time
from headrace import Done, Observation


class Echo:
    """Replies to three texts, and likes some of them."""

    def start(self, prompt):
        self.texts = []
        return f"say something about {prompt.fields['answer']}"

    def reply(self, text):
        self.texts.append(text)
        worth = sum(map(ord, text)) % 97 / 97
        if len(self.texts) == 3:
            raise Done("enough", reward=worth)
        return Observation(f"I heard {len(text)} characters: {sum(map(ord, text)) % 7}", reward=worth / 10)

    def state(self):
        return str(len(self.texts))


class Slow(Echo):
    async def reply(self, text):
        await asyncio.sleep(0.05)
        return super().reply(text)


class Sleepy(Echo):
    async def reply(self, text):
        await asyncio.sleep(0.4)
        return super().reply(text)


class Kept(Echo):
    """Can be restored, and cannot be repeated: its replies differ each time."""

    def reply(self, text):
        time.sleep(0.02)
        said = super().reply(text)
        return Observation(f"{said} {time.time_ns() % 10}", reward=said.reward)

    def snapshot(self):
        return self.texts

    def restore(self, texts):
        self.texts = texts


class Fickle(Echo):
    def reply(self, text):
        return Observation(f"{super().reply(text)} {time.time_ns()}", reward=0.0)


class Moody(Echo):
    def reply(self, text):
        mood = sum(map(ord, text)) % 4
        if mood == 0 and len(self.texts) == 1:
            raise RuntimeError("not today")
        if mood == 1 and len(self.texts) == 1:
            os._exit(3)
        if mood == 2 and len(self.texts) == 1 and prompt_is_slow(text):
            time.sleep(60)
        return super().reply(text)


def prompt_is_slow(text):
    return sum(map(ord, text)) % 5 == 0


class Long(Echo):
    """Ten turns after a long first message."""

    def start(self, prompt):
        super().start(prompt)
        return "Say ten things. " + "These are the rules. " * 20

    def reply(self, text):
        self.texts.append(text)
        if len(self.texts) == 10:
            raise Done("enough", reward=sum(map(ord, text)) % 97 / 97)
        return "go on"


class Unpaid(Echo):
    def reply(self, text):
        raise Done("bye")


class Endless(Echo):
    max_turns = 2

    def reply(self, text):
        return "go on"
'''


class ChatWorkshop(Workshop):
    """A workshop whose model takes chats, with the environments above in place of rewards."""

    def __init__(self, directory: Path, *settings: str) -> None:
        super().__init__(directory, *settings)
        tiny_model(self.model, tokenizer=chat_tokenizer())
        (directory / "environments.py").write_text(ENVIRONMENTS, encoding="utf-8")

    def overrides(self, name: str, *extra: str, reward: str = "Echo") -> list[str]:
        return [
            *(word for word in super().overrides(name) if not word.startswith(("reward.", "rollout.stop"))),
            f"episode.environment={self.directory / 'environments.py'}:{reward}",
            "rollout.max_new_tokens=6",
            *extra,
        ]

    def config(self, name: str, *extra: str, reward: str = "Echo") -> Config:
        return super().config(name, *extra, reward=reward)

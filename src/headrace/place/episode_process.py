"""Episodes in a process of their own, for a run that feeds a GPU or a cluster.

Chats, environments and the endpoint for agents then take no time from the engine's threads. The
two processes call each other over a socket.
"""

import asyncio
import gc
import itertools
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.episode.chat import Chat, Messages
from headrace.episode.environment import Environments
from headrace.episode.played import Player
from headrace.episode.session import Desk, Episodes
from headrace.errors import DataError, HeadraceError, RunError
from headrace.loop.watchdog import background
from headrace.policy.policy import load_tokenizer
from headrace.reward.function import Setup
from headrace.reward.pool import JudgePool
from headrace.reward.worker import HEADER, frame
from headrace.rollout.pool import RolloutPool
from headrace.serve.agent import Agents
from headrace.types import Example, Order, Outcome, Prompt, Trajectory
from headrace.user_code import LOADED_FROM, search_path, short_traceback, user_folders

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from headrace.place.episode_process import main; main(int(sys.argv[1]))"
END_S = 5.0  # for the process to end by itself
ENDED = "the process of the episodes has ended; `headrace resume` goes on with the run"

Note = Callable[[str], None]  # tells the user
Make = Callable[[Desk, Note], Any]  # what leads the episodes


class Line:
    """Calls between the event loops of two processes: `served` are those that the other end may make, by name.

    They are begun in the order in which they were made.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, served: dict[str, Callable[..., Any]]
    ) -> None:
        self.served = served
        self._numbers, self._asked = itertools.count(1), dict[int, asyncio.Future[Any]]()
        self._answering: set[asyncio.Task[None]] = set()
        self._reader, self._writer = reader, writer
        self.listening = asyncio.create_task(self._listen())

    def tell(self, method: Callable[..., Any], *given: Any) -> None:
        self._say(0, method.__name__, given)

    def ask(self, method: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._say(number, method.__name__, given)
        self._asked[number] = answer
        if self._writer.is_closing():
            self._fail(RunError(ENDED))
        return answer

    def hang_up(self) -> None:
        self._writer.close()

    async def _listen(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                self._hear(*pickle.loads(await self._reader.readexactly(num_bytes)))
        self.hang_up()
        self._fail(RunError(ENDED))

    def _hear(self, number: int, name: str, given: Sequence[Any]) -> None:
        if number and name:
            background(self._answer(number, name, given), self._answering)
        elif name:
            try:
                self.served[name](*given)
            except Exception as error:
                self._fail(error)
        elif (answer := self._asked.pop(number, None)) is not None and not answer.done():
            value, failed = given
            answer.set_result(value) if failed is None else answer.set_exception(failed)

    async def _answer(self, number: int, name: str, given: Sequence[Any]) -> None:
        value, failed = None, None
        try:
            value = await self.served[name](*given)
        except Exception as error:
            failed = _portable(error)
        self._say(number, "", (value, failed))

    def _say(self, *message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(pickle.dumps(message)))

    def _fail(self, error: Exception) -> None:
        """All that was asked raises it."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked.clear()


def _portable(error: Exception) -> Exception:
    """The error, or one in its place that can be pickled."""
    known: Exception = RunError(str(error))
    with suppress(Exception):
        known = pickle.loads(pickle.dumps(error))
    if not isinstance(error, HeadraceError):
        known.add_note(short_traceback(error))
    return known


class EpisodeProcess:
    """The episodes of a run, asked like `Episodes`, which is at the other end of the line."""

    def __init__(self, make: Make, config: Config, desk: Desk, abort_requests: Any, on_note: Note) -> None:
        self._desk, self._on_note, self._spans = desk, on_note, dict[int, ExitStack]()
        limits = {"max_context": desk.max_context, "refusal": desk.refusal}
        self._given = make, config, sorted(desk.chat.stop_ids), limits, user_folders()
        asked = (self.sample, self.on_turn, self.note, self.begin, self.end)
        self._served = {each.__name__: each for each in asked} | {"forget": desk.forget, "abort": abort_requests}
        self._process: asyncio.subprocess.Process | None = None
        self._line: Line

    async def prepare(self) -> None:
        ours, theirs = socket.socketpair()
        self._line = Line(*await asyncio.open_connection(sock=ours), self._served)
        with theirs:
            argv, fds = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno())], [theirs.fileno()]
            starting = asyncio.create_subprocess_exec(*argv, *search_path(), pass_fds=fds, start_new_session=True)
            self._process = await starting
        await self._line.ask(Episodes.prepare, time.monotonic() - self._desk.now(), *self._given)

    def start(self, order: Order) -> Sequence[asyncio.Future[Outcome]]:
        try:
            return [self._line.ask(Episodes.play, order, i) for i in range(len(order.samplings))]
        except Exception as error:  # pickling runs the fields' own code
            told = f"the fields of prompt '{order.prompt.id}' cannot be pickled for another process"
            raise DataError(f"{told}: {error!r}") from error

    def abort(self, serials: Sequence[int]) -> None:
        self._line.tell(Episodes.abort, list(serials))

    async def drain(self) -> None:
        await self._line.ask(Episodes.drain)

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        return await self._line.ask(Episodes.under_way)  # type: ignore[no-any-return]

    async def worked(self, prompt: Prompt, chat: Messages) -> Example:
        return await self._line.ask(Episodes.worked, prompt, chat)  # type: ignore[no-any-return]

    async def close(self) -> None:
        if self._process is None:
            return
        self._line.hang_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def sample(self, order: Order) -> Trajectory:
        return await self._desk.sample(order)

    def on_turn(self, serial: int, episode: Trajectory) -> None:
        self._desk.on_turn(serial, episode)

    def note(self, text: str) -> None:
        self._on_note(text)

    def begin(self, key: int, stage: str) -> None:
        """A stage begins at the other end."""
        self._spans[key] = ExitStack()
        self._spans[key].enter_context(self._desk.span(stage))

    def end(self, key: int) -> None:
        self._spans.pop(key).close()


def playing(run_dir: Path, config: Config, desk: Desk, on_note: Note) -> Player | Agents:
    """Who leads the episodes of a run."""
    section = config.episode
    if section.agent:
        return Agents(config, desk, on_note)
    setup = Setup(
        function=section.environment,
        timeout_s=section.timeout_s,
        setting="episode.environment",
        sandbox=config.reward.sandbox,
        hidden=(str(run_dir.absolute()),),
    )
    hosts = [JudgePool(setup, num_workers=1, retries=0) for _ in range(section.workers)]
    return Player(Environments(hosts, section), desk, config.prompts.system, bool(config.reward.function), on_note)


async def _serve(end: socket.socket) -> None:
    line, keys, run = Line(*await asyncio.open_connection(sock=end), {}), itertools.count(), EpisodeProcess

    @contextmanager
    def span(stage: str) -> Iterator[None]:
        key = next(keys)
        line.tell(run.begin, key, stage)
        try:
            yield
        finally:
            line.tell(run.end, key)

    def sample(order: Order) -> asyncio.Future[Trajectory]:
        return line.ask(run.sample, replace(order, prompt=replace(order.prompt, fields={}, messages=())))

    async def prepare(
        origin_s: float, make: Make, config: Config, stops: list[int], limits: dict[str, Any], folders: set[str]
    ) -> None:
        LOADED_FROM.update(folders)  # of which a sandbox shows the code alone
        desk = Desk(
            chat=Chat(load_tokenizer(config.model), stops=stops),
            sample=sample,
            forget=partial(line.tell, RolloutPool.forget),
            now=lambda: time.monotonic() - origin_s,
            span=span,
            on_turn=partial(line.tell, run.on_turn),
            **limits,
        )
        episodes = Episodes(make(desk, partial(line.tell, run.note)), partial(line.tell, RolloutPool.abort))
        of_answers = (episodes.play, episodes.abort, episodes.drain, episodes.under_way)
        for serves in (*of_answers, episodes.worked, episodes.close):
            line.served[serves.__name__] = serves
        await episodes.prepare()

    line.served["prepare"] = prepare
    await line.listening
    if "close" in line.served:
        await line.served["close"]()


def main(fd: int) -> None:
    gc.freeze()  # as the commands do
    gc.set_threshold(50_000, 20, 20)
    asyncio.run(_serve(socket.socket(fileno=fd)))

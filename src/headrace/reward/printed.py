"""What workers print: passed on to this process's stdout and stderr, and kept, call by call.

A worker writes to pipes. Between two calls it writes a mark, so that each verdict gets what was
printed while it was found. What a worker printed before it crashed or was killed is there, too.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterable
from typing import IO

from headrace.reward.worker import END_OF_CALL

MAX_BYTES = 4096  # of each stream, kept of a call: its end
MAX_CALLS = 128  # that no verdict has asked for; the oldest goes first
READ_BYTES = 1 << 16
MAX_READS = 32  # in one go: a worker may print without end


class _Stream:
    """One pipe from a worker; what comes out of it goes to the file `target`."""

    def __init__(self, pipe: IO[bytes], target: int) -> None:
        self.pipe, self._target = pipe, target
        self._held = b""  # perhaps the beginning of a mark
        self.text = b""  # since the last mark
        self.calls: deque[bytes] = deque(maxlen=MAX_CALLS)
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe, self.read)

    def read(self) -> None:
        for _ in range(MAX_READS):
            data = None if self.pipe.closed else self.pipe.read(READ_BYTES)
            if data is None:
                return
            *ended, last = (self._held + data).split(END_OF_CALL)
            start = last.rfind(END_OF_CALL[:1], -len(END_OF_CALL))
            cut = start if data and start >= 0 else len(last)
            self._held = last[cut:]
            for text in ended:
                self.calls.append((self.text + text)[-MAX_BYTES:])
                self.text = b""
            self.text = (self.text + last[:cut])[-MAX_BYTES:]
            new = b"".join([*ended, last[:cut]])
            with contextlib.suppress(OSError):
                while new:
                    new = new[os.write(self._target, new) :]
            if not data:  # nobody will write any more
                asyncio.get_running_loop().remove_reader(self.pipe)
                return


class Printed:
    """What one worker prints: to its stdout and stderr, whose other ends are `pipes`."""

    def __init__(self, *pipes: IO[bytes]) -> None:
        self._streams = [_Stream(pipe, target) for target, pipe in enumerate(pipes, 1)]

    def take(self) -> str:
        """What was printed in the oldest call that has ended and was not taken yet."""
        self.rest()  # reads
        return _joined(stream.calls.popleft() if stream.calls else b"" for stream in self._streams)

    def rest(self) -> str:
        """What was printed since the last call ended."""
        for stream in self._streams:
            stream.read()
        return _joined(stream.text for stream in self._streams)

    def close(self) -> None:
        """Pass on the rest. May be called twice."""
        self.rest()
        for stream in self._streams:
            if not stream.pipe.closed:
                asyncio.get_running_loop().remove_reader(stream.pipe)
                stream.pipe.close()


def _joined(texts: Iterable[bytes]) -> str:
    stdout, stderr = (text.decode(errors="replace") for text in texts)
    return f"{stdout}[stderr]\n{stderr}" if stderr else stdout

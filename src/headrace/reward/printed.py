"""What workers print: passed on to this process's stdout and stderr, and kept, call by call.

A worker writes to pipes. Between two calls it writes a mark, so that each verdict gets what was
printed while it was found. What a worker printed before it crashed or was killed is there, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque

from headrace.reward.worker import END_OF_CALL

MAX_BYTES = 4096  # of each stream, kept of a call: its end
MAX_CALLS = 128  # that no verdict has asked for; the oldest goes first
READ_BYTES = 1 << 16
MAX_READS = 32  # in one go: a worker may print without end


class _Stream:
    """One pipe from a worker; what comes out of it goes to the file `target`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.fd, self.theirs = os.pipe()
        os.set_blocking(self.fd, False)
        self._held = b""  # perhaps the beginning of a mark
        self.text = b""  # since the last mark
        self.calls: deque[bytes] = deque(maxlen=MAX_CALLS)

    def read(self) -> bool:
        """Read what has arrived; False if nobody will write any more."""
        for _ in range(MAX_READS):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:  # closed
                return False
            *ended, last = (self._held + data).split(END_OF_CALL)
            start = last.rfind(END_OF_CALL[:1])
            cut = start if data and start >= 0 and END_OF_CALL.startswith(last[start:]) else len(last)
            self._held = last[cut:]
            for text in ended:
                self._pass_on(text)
                self.calls.append(self.text)
                self.text = b""
            self._pass_on(last[:cut])
            if len(data) < READ_BYTES:
                return bool(data)
        return True

    def _pass_on(self, text: bytes) -> None:
        if not text:
            return
        self.text = (self.text + text)[-MAX_BYTES:]
        with contextlib.suppress(OSError):
            while text:
                text = text[os.write(self._target, text) :]


class Printed:
    """What one worker prints. `ends` are the files to start it with, as its stdout and stderr."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = [_Stream(1), _Stream(2)]
        self.ends = [stream.theirs for stream in self._streams]
        for stream in self._streams:
            self._loop.add_reader(stream.fd, self._read, stream)

    def started(self) -> None:
        """The worker has its ends: they are closed here."""
        for fd in self.ends:
            os.close(fd)

    def take(self) -> str:
        """What was printed in the oldest call that has ended and was not taken yet."""
        for stream in self._streams:
            if not stream.calls:
                stream.read()
        return _joined([stream.calls.popleft() if stream.calls else b"" for stream in self._streams])

    def rest(self) -> str:
        """What was printed since the last call ended."""
        for stream in self._streams:
            stream.read()
        return _joined([stream.text for stream in self._streams])

    def close(self) -> None:
        """Pass on the rest. May be called twice."""
        for stream in self._streams:
            if stream.fd >= 0:
                stream.read()
                self._loop.remove_reader(stream.fd)
                os.close(stream.fd)
                stream.fd = -1

    def _read(self, stream: _Stream) -> None:
        if not stream.read():
            self._loop.remove_reader(stream.fd)


def _joined(texts: list[bytes]) -> str:
    stdout, stderr = (text.decode(errors="replace") for text in texts)
    return f"{stdout}[stderr]\n{stderr}" if stderr else stdout

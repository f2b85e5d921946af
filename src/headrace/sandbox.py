"""Run code that nobody trusts, under bubblewrap: `headrace.sandbox.run(code)`.

The code's processes are in namespaces of their own, without rights. They see no network, no other process
and no file but the system's programs and Python's (read-only) and a directory in memory. Limits hold for
time, memory, processes, disk and output. What the code does is at worst a named failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from headrace.errors import SandboxError
from headrace.syscalls import syscall_filter

WORK = "/tmp/work"  # the code's directory
INSIDE = "HEADRACE_SANDBOX"  # environment variable, set in a sandbox
NOBODY = 65534  # user and group of the code, if this process is root
LOOK_S = 0.02  # between two looks at the memory of a sandbox
START_S = 30.0  # for the first one, which is empty
SHM_MB = 64
READ_BYTES = 1 << 16
MB = 1 << 20

_HOW = (
    "Debian and Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap. "
    "With reward.sandbox = false, reward functions run without it"
)
_ISOLATED = (
    "--unshare-all --unshare-user --disable-userns --cap-drop ALL --die-with-parent --new-session --clearenv "
    f"--proc /proc --dev /dev --size {SHM_MB * MB} --tmpfs /dev/shm --remount-ro /dev"
).split()
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
    "/sys/devices/system/cpu",  # libraries choose their code by it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended.

    Example:
        Ran(stdout="42\\n", stderr="", exit_code=0, seconds=0.08, failure="")
        Ran(stdout="", stderr="", exit_code=None, seconds=10.0, failure="timeout")
    """

    stdout: str
    stderr: str
    exit_code: int | None  # None: it was ended; more than 128: by that signal
    seconds: float
    failure: str  # "", "timeout", "memory", "output" (too much), "crash" (by a signal) or "cancelled"


def run(
    code: str | Sequence[str],
    *,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    read_only: Iterable[str | Path] = (),
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    processes: int = 32,
    disk_mb: int = 64,
    output_kb: int = 256,
    cancelled: threading.Event | None = None,
) -> Ran:
    """Run Python `code`, or a command given as a list, in a sandbox of its own.

    `files` are written into its directory. Of the files here it sees those that `read_only` names.
    `memory_mb` is for all its processes together, `output_kb` for each of stdout and stderr. Setting
    `cancelled`, from another thread, ends it.
    """
    began, written = time.monotonic(), dict(files or {})
    if isinstance(code, str):
        written["main.py"] = code
        code = [sys.executable, "-s", "-B", "main.py"]
    cpu_s = int(timeout_s * (os.cpu_count() or 1)) + 2  # a second line: the clock is the first
    # of addresses, a program has more than of memory: libraries, stacks, what it reserves and never uses
    limits = {"as": 2 * memory_mb * MB, "cpu": cpu_s, "nproc": processes, "nofile": 256}
    shown = [*map(str, read_only)]
    if missing := [path for path in shown if not os.path.exists(path)]:
        raise SandboxError(f"read_only: there is no {missing[0]}")
    one_thread = {"OMP_NUM_THREADS": "1"}  # for each core there is, they would count as processes
    enclosing = enclosed(code, limits, read_only=shown, files=written, env=one_thread, disk_mb=disk_mb)
    with contextlib.ExitStack() as stack:
        status, theirs = os.pipe()
        stack.callback(os.close, status)
        os.set_blocking(status, False)
        with os.fdopen(theirs, "wb"), enclosing as (command, fds):
            process = stack.enter_context(_started(command, [*fds, theirs], theirs))
        limit = partial(_excess, process.pid, began + timeout_s, memory_mb * MB, cancelled or threading.Event())
        said, failure = _watch(process, stdin.encode(errors="replace"), output_kb << 10, limit)
        events = bytearray()
        _heard(status, events)
    stdout, stderr = (bytes(text).decode(errors="replace") for text in said)
    exit_code = None
    if not failure:
        if b'"exit-code"' not in events:
            raise SandboxError(f"the sandbox cannot be set up: {stderr.strip() or process.returncode}")
        exit_code = process.returncode
        if exit_code == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            failure = "memory"
        elif exit_code > 128:
            failure = "crash"
    seconds = time.monotonic() - began
    return Ran(stdout=stdout, stderr=stderr, exit_code=exit_code, seconds=seconds, failure=failure)


async def run_async(code: str | Sequence[str], **options: Any) -> Ran:
    """The same beside other coroutines. Cancelling it ends the program."""
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(run, code, **options, cancelled=cancelled)
    finally:
        cancelled.set()


# ---- the command line


@contextlib.contextmanager
def enclosed(
    argv: Sequence[str],
    limits: Mapping[str, int],
    *,
    read_only: Sequence[str] = (),
    hidden: Sequence[str] = (),
    files: Mapping[str, str | bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str = WORK,
    disk_mb: int = 64,
) -> Iterator[tuple[list[str], list[int]]]:
    """The command that runs `argv` in a sandbox, and the files it must be started with (`pass_fds`).

    Start it with an empty environment and in a session of its own: killing that process group ends
    everything inside. `limits` are those of prlimit. `hidden` directories are empty inside, whatever
    `read_only` shows.
    """
    check_system()
    shown = _outermost([*_python(), *map(os.path.abspath, read_only)])
    with contextlib.ExitStack() as stack:
        seccomp = _file_with(stack, syscall_filter(os.uname().machine))
        inner = [_tool("bwrap"), *_ISOLATED, "--size", str(disk_mb * MB), "--tmpfs", "/tmp", "--dir", WORK]
        inner += [word for path in _SYSTEM if os.path.lexists(path) for word in _as_it_is(path)]
        inner += [word for path in shown for word in ("--ro-bind", path, path)]
        for path in (path for path in map(os.path.realpath, hidden) if os.path.isdir(path)):
            for there, real in ((there, os.path.realpath(there)) for there in shown):
                if _lies_in(path, real):
                    at = os.path.normpath(os.path.join(there, os.path.relpath(path, real)))
                    inner += ["--tmpfs", at, "--remount-ro", at]
        fds = [seccomp]
        for name, content in (files or {}).items():
            fds.append(_file_with(stack, content.encode(errors="replace") if isinstance(content, str) else content))
            inner += ["--file", str(fds[-1]), _inside_work(name)]
        folders = os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"
        known = {"PATH": ":".join(folders), "HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "nobody"}
        for name, value in (known | dict(env or {}) | {INSIDE: "1"}).items():
            inner += ["--setenv", name, value]
        inner += ["--dir", cwd, "--chdir", cwd, "--remount-ro", "/", "--seccomp", str(seccomp), "--"]
        # set inside: there the limit of processes counts those of this sandbox alone
        bounds = {"core": 0, "fsize": disk_mb * MB} | dict(limits)
        inner += ["prlimit", *(f"--{name}={most}" for name, most in bounds.items()), "--"]
        inner += ["choom", "-n", "1000", "--"]  # if the machine runs out of memory, this goes first
        yield [*_as_nobody(shown), *inner, *argv], fds


def _as_nobody(shown: Sequence[str]) -> list[str]:
    """What starts the sandbox as another user, if this one is root.

    That user may not enter folders such as /root. There, what the sandbox shows is mounted at its own
    path on an empty folder, by a bubblewrap that is still root.
    """
    if os.geteuid() != 0:
        return []
    drop = [_tool("setpriv"), "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--"]
    closed: dict[str, list[str]] = {}
    for path in sorted({*shown, *map(os.path.realpath, shown)}):
        mode = os.stat(path).st_mode
        if not mode & 0o004 or (os.path.isdir(path) and not mode & 0o001):
            raise SandboxError(
                f"the sandbox runs as user {NOBODY}, who cannot read {path}: allow it with chmod -R o+rX {path}"
            )
        parents = [str(parent) for parent in reversed(Path(path).parents)]
        shut = [parent for parent in parents if not os.stat(parent).st_mode & 0o001]
        if shut:
            closed.setdefault(shut[0], []).append(path)
    if not closed:
        return drop
    # The death of this process ends a process namespace, but no process of another user.
    outer = [_tool("bwrap"), "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/"]
    for folder, paths in closed.items():
        outer += ["--tmpfs", folder]
        for path in paths:
            between = [str(parent) for parent in reversed(Path(path).parents) if _lies_in(str(parent), folder)]
            outer += [word for parent in between[1:] for word in ("--perms", "0755", "--dir", parent)]
            outer += ["--ro-bind", path, path]
    return [*outer, "--", *drop]


@cache
def check_system() -> None:
    """Raise SandboxError if no sandbox can be made here."""
    if os.environ.get(INSIDE):
        raise SandboxError(
            "this code is in a sandbox already (reward.sandbox = true), and there is none inside another; "
            "a reward function that calls headrace.sandbox.run needs reward.sandbox = false"
        )
    missing = [name for name in ("bwrap", "setpriv", "prlimit", "choom") if shutil.which(name) is None]
    if missing:
        raise SandboxError(f"the sandbox needs bubblewrap and util-linux; there is no {', '.join(missing)}. {_HOW}")
    drop = _as_nobody([])
    tried = [*drop, _tool("bwrap"), *_ISOLATED, "--ro-bind", "/", "/", "--", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, timeout=START_S)
    if done.returncode:
        raise SandboxError(
            f"bubblewrap does not work here: {done.stderr.strip()}. It must be 0.8 or newer, and the system must allow "
            "user namespaces (kernel.unprivileged_userns_clone, AppArmor, and the limits of a container). " + _HOW
        )


@cache
def _tool(name: str) -> str:
    return os.path.abspath(shutil.which(name) or name)


@cache
def _python() -> tuple[str, ...]:
    """Where this Python and its packages are."""
    found = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))]
    return tuple(dict.fromkeys([*found, *map(os.path.realpath, found)]))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without what does not exist, and what is shown with another."""
    kept: list[str] = []
    for path in sorted({path for path in paths if os.path.exists(path) and path != "/"}, key=len):
        if not any(_lies_in(path, other) for other in ("/usr", *kept)):
            kept.append(path)
    return kept


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _as_it_is(path: str) -> list[str]:
    return ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]


def _inside_work(name: str) -> str:
    path = os.path.normpath(os.path.join(WORK, name))
    if path == WORK or not _lies_in(path, WORK) or "\0" in name:
        raise SandboxError(f"files: {name!r} is not the name of a file in the sandbox's directory")
    return path


def _file_with(stack: contextlib.ExitStack, content: bytes) -> int:
    fd = os.memfd_create("sandbox")
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# ---- a program while it runs


@contextlib.contextmanager
def _started(command: Sequence[str], fds: Sequence[int], status: int) -> Iterator[subprocess.Popen[bytes]]:
    place = len(command) - 1 - command[::-1].index("--seccomp")
    command = [*command[:place], "--json-status-fd", str(status), *command[place:]]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=fds, env={}, cwd="/", start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _watch(
    process: subprocess.Popen[bytes], stdin: bytes, most_bytes: int, excess: Callable[[], str]
) -> tuple[list[bytearray], str]:
    """Feed the program and read it until it ends or exceeds a limit. Returns what it said, and the failure."""
    ended, entry = os.pidfd_open(process.pid), _pipe(process.stdin).fileno()
    said = {_pipe(stream).fileno(): bytearray() for stream in (process.stdout, process.stderr)}
    waiting = select.poll()
    try:
        for fd in (entry, *said):
            os.set_blocking(fd, False)
        for fd in (ended, *said):
            waiting.register(fd, select.POLLIN)
        waiting.register(entry, select.POLLOUT)
        failure = ""
        while not failure and process.poll() is None:
            for fd, _ in waiting.poll(LOOK_S * 1000):
                if fd == entry:
                    stdin = _fed(entry, stdin)
                    if not stdin:
                        waiting.unregister(entry)
                        _pipe(process.stdin).close()
                elif fd in said and not _heard(fd, said[fd]):
                    waiting.unregister(fd)
            failure = "output" if max(map(len, said.values())) > most_bytes else excess()
        for fd, text in said.items():  # what it left in the pipes
            while not failure and _heard(fd, text):
                failure = "output" if len(text) > most_bytes else ""
        return [text[:most_bytes] for text in said.values()], failure
    finally:
        os.close(ended)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _fed(fd: int, stdin: bytes) -> bytes:
    """What is left of `stdin` once the program was given some; nothing if it does not want any."""
    try:
        return stdin[os.write(fd, stdin[:READ_BYTES]) :] if stdin else b""
    except BlockingIOError:
        return stdin
    except OSError:
        return b""


def _heard(fd: int, text: bytearray) -> bool:
    """Read on, without waiting; False if there is nothing more."""
    with contextlib.suppress(BlockingIOError):
        data = os.read(fd, READ_BYTES)
        text += data
        return bool(data)
    return False


def _excess(pid: int, deadline: float, most_bytes: int, cancelled: threading.Event) -> str:
    if cancelled.is_set():
        return "cancelled"
    if time.monotonic() > deadline:
        return "timeout"
    processes = list(_descendants(pid))
    # the first number counts what processes share more than once: cheap, and mostly enough
    over = sum(map(_resident, processes)) > most_bytes and sum(map(_proportional, processes)) > most_bytes
    return "memory" if over else ""


def _descendants(pid: int) -> Iterator[int]:
    """All processes of a sandbox: one whose parent has ended belongs to the sandbox's first process."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return _resident(pid)

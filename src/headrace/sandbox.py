"""Run code that nobody trusts, under bubblewrap: `headrace.sandbox.run(code)`.

The code's processes are in namespaces of their own, without rights. They see no network, no other
process and no file but the system's programs and Python's (read-only) and a directory in memory.
Limits hold for time, memory, processes, disk and output. The worst it can do is a named failure.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from headrace.errors import SandboxError

WORK = "/tmp/work"  # the code's directory
INSIDE = "HEADRACE_SANDBOX"  # environment variable, set in a sandbox
NOBODY = 65534  # user and group of the code, if this process is root
LOOK_S = 0.02  # between two looks at the memory of a sandbox
START_S = 30.0  # for the first one, which is empty
LAST_WORDS_S = 5.0  # to read what one that was killed has said
SHM_MB = 64
MB = 1 << 20

_HOW = "Debian and Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap. "
_HOW += "With reward.sandbox = false, reward functions and environments run without it"
_ISOLATED = (
    "--unshare-all --unshare-user --disable-userns --cap-drop ALL --die-with-parent --new-session --clearenv "
    f"--proc /proc --dev /dev --size {SHM_MB * MB} --tmpfs /dev/shm --remount-ro /dev"
).split()
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
_SYSTEM += ["/etc/localtime", "/sys/devices/system/cpu"]  # libraries choose their code by the last


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
    failure: str  # "", "timeout", "memory", "output" (too much) or "crash" (by a signal)


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
) -> Ran:
    """Run Python `code`, or a command given as a list, in a sandbox of its own.

    `files` are written into its directory. Of the files here it sees those that `read_only` names.
    `memory_mb` is for all its processes together, `output_kb` for each of stdout and stderr.
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
    with enclosing as (command, fds), contextlib.ExitStack() as stack:
        given = _file_with(stack, stdin.encode(errors="replace"))
        os.fchmod(given, 0o444)  # the code can read it, and nothing else
        fcntl.fcntl(given, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=given, stdout=pipe, stderr=pipe, pass_fds=fds, env={}, cwd="/", start_new_session=True
        ) as process:
            limit = partial(_excess, process.pid, began + timeout_s, memory_mb << 10)
            said, failure = _watch(process, output_kb << 10, limit)
        events = os.pread(fds[0], MB, 0)
    stdout, stderr = (text.decode(errors="replace") for text in said)
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


# ---- the system calls that it refuses, as a seccomp filter (a BPF program)

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_X32 = 0x40000000  # calls of x86_64's 32-bit cousin have this bit
# Names, numbers on x86_64 and on aarch64. Last: memory of no process, which no limit would count.
_TABLE = Path(__file__).with_name("syscalls.txt").read_text().splitlines()
REFUSED = {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, _TABLE)}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_AF_UNIX = 1

# of `struct seccomp_data`; of the argument, its lower half
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def syscall_filter(machine: str) -> bytes:
    """Refused calls fail with EPERM; a call of another architecture ends the process."""
    if machine not in _ARCHITECTURES:
        raise SandboxError(f"the sandbox has no filter for the system calls of {machine}, only of x86_64 and aarch64")
    column = list(_ARCHITECTURES).index(machine)
    refuse = _RETURN, 0, 0, _FAIL | errno.EPERM
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # its flags are in memory, where no filter can look: without it, libraries use clone
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        *(each for numbers in REFUSED.values() for each in ((_EQUAL, 0, 1, numbers[column]), refuse)),
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ALLOW),
        refuse,
        (_EQUAL, 1, 0, _SOCKET[column]),
        (_EQUAL, 0, 2, _SOCKETPAIR[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, _AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        refuse,
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


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
    """The command that runs `argv` in a sandbox, and the files to start it with (`pass_fds`).

    Start it with an empty environment and in a session of its own: killing that process group ends
    everything inside. `limits` are those of prlimit. `hidden` directories are empty inside,
    whatever `read_only` shows. If `argv` was started, the first of the files says how it ended.
    """
    check_system()
    python = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))]
    shown = _outermost([*python, *map(os.path.realpath, python), *map(os.path.abspath, read_only)])
    with contextlib.ExitStack() as stack:
        status, seccomp = _file_with(stack, b""), _file_with(stack, syscall_filter(os.uname().machine))
        inner = [_tool("bwrap"), *_ISOLATED, "--size", str(disk_mb * MB), "--tmpfs", "/tmp", "--dir", WORK]
        inner += [word for path in (*_SYSTEM, *shown) for word in ("--ro-bind-try", path, path)]
        for folder in (Path(folder).resolve() for folder in hidden if os.path.isdir(folder)):
            for there, real in ((Path(there), Path(there).resolve()) for there in shown):
                if folder.is_relative_to(real):
                    at = str(there / folder.relative_to(real))
                    inner += ["--tmpfs", at, "--remount-ro", at]
        fds = [status, seccomp]
        for name, content in (files or {}).items():
            path = os.path.normpath(os.path.join(WORK, name))
            if not path.startswith(f"{WORK}/") or "\0" in name:
                raise SandboxError(f"files: {name!r} is not the name of a file in the sandbox's directory")
            fds.append(_file_with(stack, content.encode(errors="replace") if isinstance(content, str) else content))
            inner += ["--file", str(fds[-1]), path]
        folders = os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"
        known = {"PATH": ":".join(folders), "HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "nobody"}
        for name, value in (known | dict(env or {}) | {INSIDE: "1"}).items():
            inner += ["--setenv", name, value]
        inner += ["--dir", cwd, "--chdir", cwd, "--remount-ro", "/"]
        inner += ["--json-status-fd", str(status), "--seccomp", str(seccomp), "--"]
        # set inside: there the limit of processes counts those of this sandbox alone
        bounds = {"core": 0, "fsize": disk_mb * MB} | dict(limits)
        inner += ["prlimit", *(f"--{name}={most}" for name, most in bounds.items()), "--"]
        inner += ["choom", "-n", "1000", "--"]  # if the machine runs out of memory, this goes first
        yield [*_as_nobody(shown), *inner, *argv], fds


def _as_nobody(shown: Sequence[str]) -> list[str]:
    """What starts the sandbox as another user, if this one is root.

    That user may not enter folders such as /root. There, what the sandbox shows is mounted at its
    own path on an empty folder, by a bubblewrap that is still root.
    """
    if os.geteuid() != 0:
        return []
    drop = [_tool("setpriv"), "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--"]
    closed, binds = set[str](), list[str]()
    for path in sorted({*shown, *map(os.path.realpath, shown)}):
        mode = os.stat(path).st_mode
        if not mode & 0o004 or (os.path.isdir(path) and not mode & 0o001):
            told = f"who cannot read {path}: allow it with chmod -R o+rX {path}"
            raise SandboxError(f"the sandbox runs as user {NOBODY}, {told}")
        shut = [str(parent) for parent in Path(path).parents if not os.stat(parent).st_mode & 0o001]
        if shut:
            closed.add(shut[-1])
            binds += ["--dir", os.path.dirname(path), "--ro-bind", path, path]
    if not closed:
        return drop
    # The death of this process ends a process namespace, but no process of another user.
    outer = [_tool("bwrap"), "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/"]
    outer += [word for folder in closed for word in ("--tmpfs", folder)]
    return [*outer, *binds, "--", *drop]


@cache
def check_system() -> None:
    """Raise SandboxError if no sandbox can be made here."""
    if os.environ.get(INSIDE):
        told = "a reward function that calls headrace.sandbox.run needs reward.sandbox = false"
        inside = "in a sandbox already (reward.sandbox = true), and there is none inside another"
        raise SandboxError(f"this code is {inside}; {told}")
    missing = [name for name in ("bwrap", "setpriv", "prlimit", "choom") if shutil.which(name) is None]
    if missing:
        raise SandboxError(f"the sandbox needs bubblewrap and util-linux; there is no {', '.join(missing)}. {_HOW}")
    tried = [*_as_nobody([]), _tool("bwrap"), *_ISOLATED, "--ro-bind", "/", "/", "--", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, timeout=START_S)
    if done.returncode:
        where = "kernel.unprivileged_userns_clone, AppArmor, and the limits of a container"
        told = f"It must be 0.8 or newer, and the system must allow user namespaces ({where}). {_HOW}"
        raise SandboxError(f"bubblewrap does not work here: {done.stderr.strip()}. {told}")


def _tool(name: str) -> str:
    return os.path.abspath(shutil.which(name) or name)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without what does not exist, and what is shown with another."""
    kept: list[str] = []
    for path in sorted({path for path in paths if os.path.exists(path) and path != "/"}, key=len):
        if not any(Path(path).is_relative_to(other) for other in ("/usr", *kept)):
            kept.append(path)
    return kept


def _file_with(stack: contextlib.ExitStack, content: bytes) -> int:
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = stack.enter_context(os.fdopen(fd, "w+b"))
    file.write(content)
    file.seek(0)
    return fd


def _watch(process: subprocess.Popen[bytes], most_bytes: int, excess: Callable[[], str]) -> tuple[list[bytes], str]:
    """A program, until it ends or exceeds a limit. Returns what it said, and the failure."""
    failure = ""
    try:
        while process.returncode is None and not failure:
            said = _heard(process, LOOK_S)
            failure = "output" if max(map(len, said)) > most_bytes else excess()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        said = _heard(process, LAST_WORDS_S)
    return [text[:most_bytes] for text in said], failure


def _heard(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bytes]:
    """All that it has said, once it has ended or `timeout_s` are over."""
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        return late.stdout or b"", late.stderr or b""


def _excess(pid: int, deadline: float, most_kb: int) -> str:
    if time.monotonic() > deadline:
        return "timeout"
    resident = {process: _kb(process, "status", "VmRSS:") for process in _descendants(pid)}
    if sum(resident.values()) <= most_kb:  # it counts what processes share more than once
        return ""
    parts = (_kb(process, "smaps_rollup", "Pss:") or whole for process, whole in resident.items())
    return "memory" if sum(parts) > most_kb else ""


def _descendants(pid: int) -> Iterator[int]:
    """All processes of a sandbox: one whose parent has ended belongs to its first process."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _kb(pid: int, file: str, field: str) -> int:
    """A number that the system gives for a process; 0 if it gives none."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(field))
    return 0

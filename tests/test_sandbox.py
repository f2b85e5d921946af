"""Attacks on the sandbox. Those that a plain process can make are first made by one, so that each could succeed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_sandbox

from headrace import sandbox
from headrace.errors import SandboxError
from headrace.sandbox import REFUSED, Ran, syscall_filter

BEFORE = """
import ctypes, errno, mmap, os, platform, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what): print("ESCAPED", *what, flush=True)
"""

# made by a plain process first, where it must succeed
SEES = {
    "TCP": "socket.create_connection(('127.0.0.1', TCP), 2); escaped()",
    "UDP": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', UDP)); escaped()",
    "a socket without a name": "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + ABSTRACT); escaped()",
    "a socket in a folder": "s = socket.socket(socket.AF_UNIX); s.connect(PATHNAME); escaped()",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped()",
    "the ledger": "open(LEDGER).read(); escaped()",
    "the ledger's folder": "open(LEDGER + '.new', 'w'); escaped()",
    "truncating the ledger": "os.truncate(LEDGER + '.copy', 0); escaped()",
    "a symbolic link": "os.symlink(LEDGER, f'link{os.getpid()}'); open(f'link{os.getpid()}').read(); escaped()",
    "a hard link": "os.link(LEDGER, LEDGER + '.link'); escaped()",
    "the way up": "open('../' * 40 + LEDGER).read(); escaped()",
    "the root of a process": "open('/proc/self/root' + LEDGER).read(); escaped()",
    "the environment": "os.environ['TOKEN']; escaped()",
    "seeing a process": "os.kill(VICTIM, 0); escaped()",
    "a process's command": """
for pid in filter(str.isdigit, os.listdir('/proc')):
    if MARK.encode() in open(f'/proc/{pid}/cmdline', 'rb').read(): escaped(pid); break""",
    "tracing": "assert libc.ptrace(0, 0, 0, 0) == 0; escaped()",
    "reading memory": "assert libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) == 0; escaped()",
    "memory without an owner": "os.memfd_create('x'); escaped()",
    "shared memory": "assert libc.shmget(0, 4096, 0o1600) >= 0; escaped()",
}
# only made inside
TRIES = {
    "names": "socket.getaddrinfo('example.com', 80); escaped()",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
    "passwords": "open('/etc/shadow').read(); escaped()",
    "processes of others": """
os.kill(-1, signal.SIGKILL)
if len([pid for pid in os.listdir('/proc') if pid.isdigit()]) > 2: escaped()""",
    "the first process's environment": """
if b'TOKEN' in open('/proc/1/environ', 'rb').read(): escaped()""",
    "the first process's files": """
for name in os.listdir('/proc/1/fd'):
    try: target = os.readlink(f'/proc/1/fd/{name}'); open(f'/proc/1/fd/{name}', 'rb+', buffering=0)
    except OSError: continue
    if not target.startswith(('pipe:', '/dev/null')): escaped(target)""",
    "roots of other processes": """
for way in ('/proc/1/root', '/proc/1/cwd', '/proc/self/cwd/../..', '/proc/thread-self/root', '/proc/2/root'):
    try: open(way + LEDGER); escaped(way)
    except OSError: pass""",
    "files of the system": """
for path in ('/x', '/usr/x', '/etc/x', '/dev/x', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger', sys.prefix + '/x',
             os.path.join(os.path.dirname(os.__file__), 'x.py'), '/root/x', '/var/x', '/sys/x'):
    try: open(path, 'w'); escaped(path)
    except OSError: pass""",
    "files that are open": """
for fd in range(3, 256):
    try: os.fstat(fd); escaped(fd, os.readlink(f'/proc/self/fd/{fd}'))
    except OSError: pass""",
    "a user namespace": "if libc.unshare(0x10000000) == 0: escaped()",
    "a user namespace by clone": """
done = libc.syscall({'x86_64': 56, 'aarch64': 220}[platform.machine()], 0x10000000 | 17, 0, 0, 0, 0)
if done == 0: os._exit(0)
if done > 0: escaped()""",
    "clone3": "if libc.syscall(435, None, 0) != -1 or ctypes.get_errno() != errno.ENOSYS: escaped()",
    "a mount": "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: escaped()",
    "remounting": "if libc.mount(b'none', b'/usr', None, 32 | 4096, None) == 0: escaped()",
    "a device": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); escaped()",
    "chroot": "os.chroot('/tmp'); escaped()",
    "becoming root": "os.setuid(0); escaped()",
    "programs with the rights of their owner": """
if 'uid=0' in subprocess.run(['su', '-c', 'id'], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout:
    escaped()""",
    "more than the limits allow": """
import resource
for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    try: resource.setrlimit(limit, (resource.RLIM_INFINITY,) * 2); escaped(limit)
    except (OSError, ValueError): pass""",
}
# code, options, failure, exit code
ENDS: dict[str, tuple[str, dict[str, Any], str, int | None]] = {
    "burning": ("while True: pass", {"timeout_s": 0.4}, "timeout", None),
    "sleeping": ("time.sleep(1000)", {"timeout_s": 0.4}, "timeout", None),
    "deaf": ("signal.signal(15, signal.SIG_IGN); signal.pause()", {"timeout_s": 0.4}, "timeout", None),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", {"timeout_s": 0.4}, "timeout", None),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory_mb": 64}, "memory", None),
    "memory at once": ("x = bytearray(1 << 40)", {}, "memory", 1),
    "memory of many": (
        "for _ in range(6):\n  if os.fork() == 0: break\nx = bytearray(b'x') * (30 << 20); time.sleep(60)",
        {"memory_mb": 100},
        "memory",
        None,
    ),
    "memory of orphans": (
        "for _ in range(6):\n  if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    break\n"
        "else: time.sleep(60)\nx = mmap.mmap(-1, 30 << 20); x.write(b'x' * (30 << 20)); time.sleep(60)",
        {"memory_mb": 100},
        "memory",
        None,
    ),
    "words": ("while True: print('x' * 1000)", {"output_kb": 64}, "output", None),
    "errors": ("while True: os.write(2, b'x' * 1000)", {"output_kb": 64}, "output", None),
    "words at its end": ("os.write(1, b'x' * 60_000)", {"output_kb": 16}, "output", None),
    "many processes": (
        "def fork():\n  try: return os.fork()\n  except OSError: print('no more'); sys.exit()\n"
        "while True:\n  if fork() == 0: time.sleep(60)",
        {"processes": 8},
        "",
        0,
    ),
    "a full disk": (
        "try:\n  for n in range(10**6): open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))\n"
        "except OSError as e: print(n < 5 and errno.errorcode[e.errno])",
        {"disk_mb": 4},
        "",
        0,
    ),
    "a full /dev/shm": (
        "try:\n  for n in range(10**6): open(f'/dev/shm/{n}', 'wb').write(b'x' * (1 << 20))\n"
        "except OSError as e: print(n < 65)",
        {},
        "",
        0,
    ),
    "a huge file": ("open('x', 'wb').truncate(1 << 40)", {"disk_mb": 4}, "", 1),
    "abort": ("os.abort()", {}, "crash", 134),
    "a wild pointer": ("ctypes.string_at(1)", {}, "crash", 139),
    "a call of another kind": ("libc.syscall(0x40000027)", {}, "crash", 159),
    "killing its parent": ("os.kill(os.getppid(), 9); time.sleep(0.1); sys.exit(5)", {}, "", 5),
    "an exit code": ("sys.exit(7)", {}, "", 7),
    "closed files": ("os.closerange(0, 256); os._exit(3)", {}, "", 3),
    "bubblewrap's own words": ("print('bwrap: no', file=sys.stderr); sys.exit(1)", {}, "", 1),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What there is to attack, by the names that attacks use."""
    folder = tmp_path_factory.mktemp("host")
    for name in ("ledger", "ledger.copy"):
        (folder / name).write_text("the books")
    mark, spared = f"victim-{os.getpid()}", os.environ.get("TOKEN")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    with contextlib.ExitStack() as stack:
        tcp, udp, abstract, pathname = (
            stack.enter_context(socket.socket(family, kind))
            for family in (socket.AF_INET, socket.AF_UNIX)
            for kind in ((socket.SOCK_STREAM, socket.SOCK_DGRAM) if family == socket.AF_INET else (1, 1))
        )
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{mark}")
        pathname.bind(str(folder / "socket"))
        for listening in (tcp, abstract, pathname):
            listening.listen(8)
        os.environ["TOKEN"] = "secret"
        victim = stack.enter_context(subprocess.Popen(sleeper))
        yield {
            "TCP": tcp.getsockname()[1],
            "UDP": udp.getsockname()[1],
            "ABSTRACT": mark,
            "PATHNAME": str(folder / "socket"),
            "LEDGER": str(folder / "ledger"),
            "VICTIM": victim.pid,
            "MARK": mark,
        }
        assert victim.poll() is None, "an attack killed it"
        victim.kill()
    os.environ.pop("TOKEN")
    if spared is not None:
        os.environ["TOKEN"] = spared
    assert (folder / "ledger").read_text() == "the books"


def attack(code: str, host: dict[str, Any]) -> str:
    return BEFORE + "".join(f"{name} = {value!r}\n" for name, value in host.items()) + code


@needs_sandbox
@pytest.mark.parametrize("name", SEES)
def test_what_a_plain_process_can_reach_is_out_of_reach(name: str, host: dict[str, Any], tmp_path: Path) -> None:
    code = attack(SEES[name], host)
    plain = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "ESCAPED" in plain.stdout, f"it fails without a sandbox, too: {plain.stderr}"
    ran = sandbox.run(code)
    assert "ESCAPED" not in ran.stdout
    assert (ran.failure, ran.exit_code) == ("", 0 if name == "a process's command" else 1)


@needs_sandbox
@pytest.mark.parametrize("name", TRIES)
def test_what_nobody_may_do(name: str, host: dict[str, Any]) -> None:
    ran = sandbox.run(attack(TRIES[name], host))
    assert "ESCAPED" not in ran.stdout
    assert ran.failure == ""
    assert ran.exit_code == 0 or "rror: " in ran.stderr, "the attack itself is wrong"
    assert not any(wrong in ran.stderr for wrong in ("SyntaxError", "NameError", "AttributeError", "KeyError"))


@needs_sandbox
@pytest.mark.parametrize("name", ENDS)
def test_how_it_ends(name: str) -> None:
    code, options, failure, exit_code = ENDS[name]
    ran = sandbox.run(BEFORE + code, **options)
    assert (ran.failure, ran.exit_code) == (failure, exit_code), ran
    assert len(ran.stdout) <= options.get("output_kb", 256) << 10
    expected = {"many processes": "no more", "a full disk": "ENOSPC", "a full /dev/shm": "True"}
    assert expected.get(name, "") in ran.stdout


@needs_sandbox
def test_every_refused_system_call_is_refused() -> None:
    column = ["x86_64", "aarch64"].index(os.uname().machine)
    numbers = {name: both[column] for name, both in REFUSED.items()}
    code = f"for name, number in {numbers}.items():\n  if libc.syscall(number, -1, -1, -1, -1, -1) != -1 "
    code += "or ctypes.get_errno() != errno.EPERM: print(name, ctypes.get_errno())"
    assert sandbox.run(BEFORE + code) == Ran(
        stdout="", stderr="", exit_code=0, seconds=pytest.approx(5, abs=5), failure=""
    )


@needs_sandbox
@pytest.mark.parametrize("timeout_s", [10.0, 0.5])
def test_nothing_outlives_its_sandbox(timeout_s: float) -> None:
    mark = f"daemon-{os.getpid()}-{timeout_s}"
    code = f"""
for _ in range(3):
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
    subprocess.Popen([sys.executable, "-c", deaf, {mark!r}], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
time.sleep({0 if timeout_s > 1 else 60})"""
    assert sandbox.run(BEFORE + code, timeout_s=timeout_s).failure == ("" if timeout_s > 1 else "timeout")
    deadline = time.monotonic() + 10
    while any(mark.encode() in command for command in commands()):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


def commands() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if b"bwrap" not in command:
                yield command


@needs_sandbox
def test_what_it_is_given_and_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "shown.txt").write_text("shown")
    (tmp_path / "not.txt").write_text("not shown")
    code = "import sys, tables.one\nprint(open('in.txt').read(), tables.one.N, len(sys.stdin.read()), sys.argv)\n"
    code += f"print(open({str(tmp_path / 'shown.txt')!r}).read()); open({str(tmp_path / 'not.txt')!r})"
    files = {"in.txt": "given", "tables/one.py": "N = 3", "bytes": b"\xff"}
    ran = sandbox.run(code, stdin="x" * 300_000, files=files, read_only=[tmp_path / "shown.txt"])
    assert ran.stdout == "given 3 300000 ['main.py']\nshown\n"
    assert "FileNotFoundError" in ran.stderr
    assert (ran.exit_code, ran.failure) == (1, "")
    assert sandbox.run("import os; os.write(1, b'\\xff')", stdin="y" * 1_000_000).stdout == "\ufffd", (
        "stdin is not read"
    )
    assert sandbox.run(["sh", "-c", "echo $0 >&2; exit 4", "word"]).stderr == "word\n"
    assert sandbox.run(["no-such-program"]).exit_code == 127
    for wrong in ("../x", "/etc/x", "", "."):
        with pytest.raises(SandboxError, match="not the name of a file"):
            sandbox.run("", files={wrong: ""})
    with pytest.raises(SandboxError, match="there is no"):
        sandbox.run("", read_only=[tmp_path / "nothing"])
    with pytest.raises(SandboxError, match=r"cannot be set up: .*No space left"):
        sandbox.run("", files={"big": "x" * (2 << 20)}, disk_mb=1)


@needs_sandbox
async def test_several_at_a_time() -> None:
    codes = [f"import time; time.sleep(0.2); print({n})" for n in range(4)]
    began = time.monotonic()
    ran = await asyncio.gather(*(asyncio.to_thread(sandbox.run, code) for code in codes))
    assert [r.stdout for r in ran] == ["0\n", "1\n", "2\n", "3\n"]
    assert time.monotonic() - began < sum(r.seconds for r in ran)


@needs_sandbox
def test_a_sandbox_ends_with_the_process_that_made_it() -> None:
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(600)', os.environ['MARK']]"
    code = f"import os, sys; from headrace.sandbox import run; run({sleeper}, timeout_s=600)"
    mark = f"orphan-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"MARK": mark}) as parent:
        while not any(mark.encode() in command for command in commands()):
            assert parent.poll() is None
            time.sleep(0.02)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(mark.encode() in command for command in commands()):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_file_that_nobody_may_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "private").touch(mode=0o600)
    with pytest.raises(SandboxError, match=r"who cannot read .*private: allow it with chmod"):
        sandbox.run("", read_only=[tmp_path / "private"])


def test_where_there_is_no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.check_system.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SandboxError, match=r"there is no bwrap.*apt install bubblewrap.*reward.sandbox = false"):
        sandbox.run("")
    monkeypatch.setenv(sandbox.INSIDE, "1")
    with pytest.raises(SandboxError, match="in a sandbox already"):
        sandbox.run("")


def test_filters_are_whole_programs() -> None:
    for machine in ("x86_64", "aarch64"):
        program = syscall_filter(machine)
        assert len(program) % 8 == 0
        for place in range(0, len(program), 8):
            code, yes, no = program[place], program[place + 2], program[place + 3]
            assert place + 8 * (1 + max(yes, no)) < len(program) or code == 0x06, "it jumps out of the program"
    with pytest.raises(SandboxError, match="riscv64"):
        syscall_filter("riscv64")

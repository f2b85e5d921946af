"""Workers in a sandbox (`reward.sandbox`): what they see of the files here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from headrace.reward.function import Setup
from headrace.sandbox import enclosed
from headrace.user_code import names_file, search_path, user_folders

LIMITS = {"nproc": 1024, "nofile": 1024}  # threads count as processes
DISK_MB = 256
PASSED_ON = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "TZ")  # of the environment


@contextlib.contextmanager
def isolated(argv: Sequence[str], setup: Setup) -> Iterator[tuple[list[str], list[int]]]:
    """The command that starts a worker, and the files to start it with."""
    if not setup.sandbox:
        yield list(argv), []
        return
    folders, place = user_folders(), setup.function.rpartition(":")[0]
    code = [os.path.abspath(os.path.expanduser(place))] if names_file(place) else []
    folders |= {os.path.dirname(os.path.realpath(path)) for path in code}
    shown = [path for path in search_path() if os.path.realpath(path) not in folders]
    shown += [*code, *(path for folder in folders for path in _code_in(folder))]
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    here = os.getcwd()
    with enclosed(argv, LIMITS, read_only=shown, hidden=setup.hidden, env=env, cwd=here, disk_mb=DISK_MB) as found:
        yield found


def _code_in(folder: str) -> Iterator[str]:
    """Modules and packages. Other files of a folder may be anything: data, keys, runs."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            package = entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))
            readable = os.geteuid() != 0 or entry.stat().st_mode & 0o004
            if readable and (package or (entry.is_file() and entry.name.endswith((".py", ".so")))):
                yield entry.path

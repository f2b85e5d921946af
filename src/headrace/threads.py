"""How the CPU threads of a training process share its cores."""

from __future__ import annotations

import os


def choose_wait_policy() -> None:
    """Say how torch's CPU threads wait for each other: spinning, their default, or asleep.

    Spinning is faster while they have the cores to themselves, but spinning threads starve each other when anything
    else wants one. Measured on two cores, generating with a small model: alone 21,000 tokens per second spinning and
    16,000 asleep; beside one busy process 5,000 and 14,000. It takes effect only before torch is first imported.
    """
    try:
        with open("/proc/loadavg") as file:
            num_running = int(file.read().split()[3].split("/")[0])  # this process is one of them
    except OSError:
        return  # not Linux
    if num_running > 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""The system calls that a sandbox refuses, as a seccomp filter (a BPF program) for bubblewrap.

A filter reads `struct seccomp_data`: the call's number, the architecture, the arguments. Linux numbers
calls per architecture up to 423, and alike from 424 on.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

from headrace.errors import SandboxError

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_X32 = 0x40000000  # calls of x86_64's 32-bit cousin have this bit
# by name: the number on x86_64 and on aarch64
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # memory that belongs to no process, so that no limit on processes would count it
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_AF_UNIX = 1

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets; of the argument, its lower half
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
    ]
    for numbers in _REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), refuse]
    program += [
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
    return _assembled(program)


def _assembled(program: Iterable[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)

"""Seccomp filter: refuses system calls that a boxed process and its descendants do not need.

It closes what Landlock leaves open: sockets of every family, new sessions and process groups (so
that a signal to the group ends all), memory that outlives its process or that no limit counts,
modes and owners of files, limits and priorities of other processes, namespaces, and io_uring, which
would do the same past a filter; and where Landlock is too old for it, signals to other processes
and truncation. Source: the man pages seccomp(2) and syscall(2), and linux/filter.h. Only the
standard library is imported here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterable, Sequence

from tuna.sandbox import landlock

_PR_SET_NO_NEW_PRIVS, _PR_GET_SECCOMP = 38, 21
_SET_MODE_FILTER = 1
#: Flags that give every thread the filter, and none the mitigation of speculative store bypass,
#: which would make what is measured slower
_ALL_THREADS, _NO_MITIGATION = 1, 4
_PR_SET_PDEATHSIG = 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
#: Offsets in struct seccomp_data, little-endian: number, architecture, instruction pointer, six
#: 64-bit values
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_Instruction = tuple[int, int, int, int]  #: struct sock_filter: code, jt, jf, k
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_ALL_BITS = 0xFFFFFFFF
#: AUDIT_ARCH_*, and place of the architecture's number in `CALLS`
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32 = 0x40000000

#: Number of each system call on x86_64 and on aarch64, which lacks the older forms.
CALLS: dict[str, tuple[int, int | None]] = {
    "accept": (43, 202), "accept4": (288, 242), "acct": (163, 89), "add_key": (248, 217),
    "adjtimex": (159, 171), "bind": (49, 200), "bpf": (321, 280), "chmod": (90, None),
    "chown": (92, None), "chroot": (161, 51), "clock_adjtime": (305, 266),
    "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435), "connect": (42, 203),
    "delete_module": (176, 106), "execve": (59, 221), "execveat": (322, 281), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "finit_module": (313, 273), "fork": (57, None), "fremovexattr": (199, 16),
    "fsconfig": (431, 431), "fsetxattr": (190, 7), "fsmount": (432, 432), "fsopen": (430, 430),
    "fspick": (433, 433), "futimesat": (261, None), "init_module": (175, 105),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "ioperm": (173, None), "iopl": (172, None), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "kill": (62, 129), "lchown": (94, None), "listen": (50, 201), "lremovexattr": (198, 15),
    "lsetxattr": (189, 6), "memfd_create": (319, 279), "memfd_secret": (447, 447), "mmap": (9, 222),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "msgget": (68, 186), "open": (2, None),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "openat": (257, 56),
    "openat2": (437, 437), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "prctl": (157, 167),
    "prlimit64": (302, 261), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "removexattr": (197, 14),
    "removexattrat": (466, 466), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "seccomp": (317, 277), "semget": (64, 190),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "setpgid": (109, 154), "setpriority": (141, 140), "setsid": (112, 157),
    "settimeofday": (164, 170), "setxattr": (188, 5), "setxattrat": (463, 463), "shmget": (29, 194),
    "socket": (41, 198), "socketpair": (53, 199), "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130), "truncate": (76, 45),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None),
    "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None), "vhangup": (153, 58),
}  # fmt: skip

_REFUSED = (
    *("socket", "connect", "bind", "listen", "accept", "accept4"),
    *("setsid", "setpgid"),  # what it starts stays in the process group, which is killed as a whole
    *("shmget", "semget", "msgget", "mq_open", "mq_unlink"),  # these outlive the process
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise"),
    *("kcmp", "pidfd_getfd", "perf_event_open"),
    *("setpriority", "sched_setscheduler", "sched_setparam", "sched_setattr", "ioprio_set"),
    *("add_key", "request_key", "keyctl", "bpf", "userfaultfd", "open_by_handle_at"),
    *("mount", "umount2", "pivot_root", "chroot", "setns"),
    *("unshare", "open_tree", "move_mount", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "init_module"),
    *("finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    *("reboot", "swapon", "swapoff", "sethostname"),
    *("setdomainname", "settimeofday", "clock_settime", "clock_adjtime"),
    *("adjtimex", "acct", "quotactl", "quotactl_fd", "syslog", "iopl", "ioperm", "vhangup"),
    *("chown", "fchown", "lchown", "fchownat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)  # fmt: skip
#: Calls that succeed and do nothing: linkers and MIOpen make them on files of their own, where
#: nothing depends on them, and a filter cannot tell whose file a path names
_WITHOUT_EFFECT = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
#: Calls that seem unknown to the kernel, so that callers take an older form, whose arguments a
#: filter can see
_UNKNOWN = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
#: Calls that make memory which RLIMIT_DATA does not count: memory files, shared anonymous maps,
#: stack-like maps
_FILES_OF_MEMORY = ("memfd_create", "memfd_secret")
_SHARED_ANONYMOUS, _GROWS_DOWN = 0x21, 0x100
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
#: Flags CLONE_NEW*: time, mount, cgroup, uts, ipc, user, pid, net
_NAMESPACES = (
    0x80 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
_CLONE_THREAD = 0x00010000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF
#: AF_INET, and the mask under which AF_INET6 (10) equals it (2)
_AF_INET, _ANY_INET = 2, _ALL_BITS ^ 8
#: System calls that connect to another machine.
_CONNECTING = ("socket", "connect")

_installed = False


class Filter:
    """The instructions of a filter; the first rule that knows a system call decides."""

    def __init__(self, machine: str) -> None:
        architecture, self._column = _MACHINES[machine]
        self._code = [
            # a 32-bit call has other numbers
            *self._check(_ARCHITECTURE, _EQUAL, architecture, holds=False),
            (_LOAD, 0, 0, _NUMBER),
            *([(_AT_LEAST, 0, 1, _X32), self._answer(errno.EPERM)] if machine == "x86_64" else []),
        ]

    def refuse(self, names: Iterable[str], number: int = errno.EPERM) -> None:
        """Answer these system calls with an error; with 0 they succeed and do nothing."""
        for name in names:
            self._when(name, [self._answer(number)])

    def refuse_if(self, name: str, *checks: Sequence[_Instruction]) -> None:
        """Refuse a call if any of the checks (see `has`, `differs`) holds."""
        self._when(name, [one for check in checks for one in check] + [(_RETURN, 0, 0, _ALLOW)])

    def has(self, argument: int, bits: int) -> list[_Instruction]:
        """A check: the argument's lower half has any of these bits."""
        return self._check(_ARGUMENTS + 8 * argument, _ANY_BIT, bits)

    def lacks(self, argument: int, bits: int) -> list[_Instruction]:
        """A check: it has none of these bits."""
        return self._check(_ARGUMENTS + 8 * argument, _ANY_BIT, bits, holds=False)

    def equals(self, argument: int, value: int, mask: int = _ALL_BITS) -> list[_Instruction]:
        """A check: the argument's lower half, after `mask`, is this value."""
        return self._check(_ARGUMENTS + 8 * argument, _EQUAL, value, mask)

    def differs(self, argument: int, value: int, mask: int = _ALL_BITS) -> list[_Instruction]:
        """A check: it is another value."""
        return self._check(_ARGUMENTS + 8 * argument, _EQUAL, value, mask, holds=False)

    def install(self) -> None:
        """Install it for this process, its later threads and its descendants; raises OSError."""
        code = [*self._code, (_RETURN, 0, 0, _ALLOW)]
        text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
        program = ctypes.create_string_buffer(
            struct.pack("HxxxxxxP", len(code), ctypes.addressof(text))
        )
        libc, number = ctypes.CDLL(None, use_errno=True), CALLS["seccomp"][self._column]
        flags = ctypes.c_ulong(_ALL_THREADS | _NO_MITIGATION)
        failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
            number, _SET_MODE_FILTER, flags, program
        )
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "seccomp")

    def _when(self, name: str, body: Sequence[_Instruction]) -> None:
        """Apply the body to this system call; others pass with their number still loaded."""
        number = CALLS[name][self._column]
        if number is not None:
            self._code += [(_EQUAL, 0, len(body), number), *body]

    def _check(
        self, place: int, how: int, value: int, mask: int = _ALL_BITS, *, holds: bool = True
    ) -> list[_Instruction]:
        """Refuse the call if the comparison `holds`, or if it does not; else go on behind this."""
        skip = (0, 1) if holds else (1, 0)
        return [
            (_LOAD, 0, 0, place),
            (_AND, 0, 0, mask),
            (how, *skip, value),
            self._answer(errno.EPERM),
        ]

    @staticmethod
    def _answer(number: int) -> _Instruction:
        return _RETURN, 0, 0, _ERRNO | number


def available() -> bool:
    """Whether this kernel filters system calls, and this machine's numbers are known here."""
    return (
        os.uname().machine in _MACHINES
        and ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
    )


def restrict(abi: int, *, network: bool = False, gpus: bool = False) -> None:
    """Install the filter that the module describes; raises OSError.

    `abi` is the version of Landlock that was applied. With `network` the process may open
    connections over IPv4 and IPv6, but accepts none. With `gpus` it may share memory, as drivers
    do.
    """
    global _installed
    made = Filter(os.uname().machine)
    made.refuse(name for name in _REFUSED if not (network and name in _CONNECTING))
    if network:
        made.refuse_if("socket", made.differs(0, _AF_INET, _ANY_INET))
    made.refuse(_WITHOUT_EFFECT, 0)
    made.refuse(_UNKNOWN, errno.ENOSYS)
    made.refuse_if("clone", made.has(0, _NAMESPACES))
    made.refuse_if(
        "socketpair", made.differs(0, _AF_UNIX), made.differs(1, _SOCK_STREAM, _SOCK_TYPES)
    )
    if not gpus:
        made.refuse(_FILES_OF_MEMORY, errno.ENOSYS)
        made.refuse_if(
            "mmap", made.equals(3, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS), made.has(3, _GROWS_DOWN)
        )
    made.refuse_if("prlimit64", made.differs(0, 0))  # of this process alone
    _keep_death_signal(made)
    if abi < landlock.SIGNALS:
        for name in _SIGNALS:  # its children have other process ids, and can signal none
            made.refuse_if(name, made.differs(0, os.getpid()))
        made.refuse(["pidfd_send_signal"])
    if abi < landlock.TRUNCATION:
        made.refuse(["truncate"])
        made.refuse(["openat2"], errno.ENOSYS)
        for name, flags in (("open", 1), ("openat", 2)):
            made.refuse_if(name, made.equals(flags, os.O_TRUNC, os.O_TRUNC | os.O_ACCMODE))
    made.install()
    _installed = True


def _keep_death_signal(made: Filter) -> None:
    """Let PR_SET_PDEATHSIG be set to SIGKILL alone, so that the process dies with its parent."""
    pass_by = [(_LOAD, 0, 0, _ARGUMENTS), (_EQUAL, 0, 4, _PR_SET_PDEATHSIG)]
    made.refuse_if("prctl", [*pass_by, *made.differs(1, signal.SIGKILL)])


def forbid_processes() -> None:
    """Forbid this process to start others, threads apart; raises OSError.

    It has no effect outside of a box.
    """
    if not _installed:
        return
    made = Filter(os.uname().machine)
    made.refuse(["fork", "vfork", "execve", "execveat"])
    made.refuse_if("clone", made.lacks(0, _CLONE_THREAD))
    made.install()

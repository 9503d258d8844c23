"""Confine a program: `python -I confine.py SETTINGS PROGRAM [ARGUMENT …]`. Imports nothing from the project.

SETTINGS is JSON. With `root`, an empty folder, the program gets separate mount, network and IPC namespaces. It sees
only these parts of the file system: the folders `shown` (read-only), the folders `kept` (writable), the system's
programs and libraries except the files and folders `hidden`, and empty folders for temporary files. A shown or kept
folder stays visible even if it is inside a hidden folder. With `uid` and `gid` the program runs as that user, without
supplementary groups. Without them it keeps the current user, and the namespaces belong to a new user namespace. The
program has no capabilities and can't gain any.

If a step fails, this script exits with code 126 and prints the reason to stderr (Linux manual, namespaces(7),
pivot_root(2)).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH, PR_SET_NO_NEW_PRIVS = 2, 38
# The mount options that a user namespace may not drop, as (statvfs flag, mount flag).
KEPT_OPTIONS = ((2, 2), (4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))
# The system's files that a server needs. Never show all of /etc, which may contain files that only this user can read.
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/var/cache/postgresql",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/locale.alias",
    "/etc/alternatives",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FAILED = 126

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raise an OSError that names it if it fails or does not exist."""
    if not hasattr(libc, name):
        raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}")
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), None if options is None else options.encode())


def show(root: str, path: str, *, is_kept: bool = False) -> None:
    """Show the program a file or folder at its original path, read-only unless `is_kept`."""
    shown, place = Path(path), Path(root + path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if shown.is_symlink():
        if not os.path.lexists(place):
            place.symlink_to(shown.readlink())
        return
    if shown.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    # Include the mounts below it: otherwise the kernel refuses, because files hidden by another mount would be exposed.
    mount(path, str(place), None, MS_BIND | MS_REC)
    if not is_kept:
        had = os.statvfs(place).f_flag
        flags = sum(flag for option, flag in KEPT_OPTIONS if had & option)
        mount(None, str(place), None, MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def hide_all(settings: dict[str, Any], program: str) -> None:
    """Hide the whole file system, except the paths in `settings` and SYSTEM."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = settings["root"]
    # Make the folders above the shown files accessible to everybody.
    before = os.umask(0o022)
    mount("none", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for path in SYSTEM:
        if os.path.lexists(path):
            show(root, path)
    for path in DEVICES:
        show(root, path, is_kept=True)
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        Path(root + path).mkdir(parents=True, exist_ok=True)
        mount("none", root + path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    # Any hidden path may have been deleted in the meantime.
    for path in settings["hidden"]:
        with suppress(FileNotFoundError):
            if Path(root + path).is_dir():
                mount("none", root + path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for path in settings["shown"]:
        show(root, path)
    for path in settings["kept"]:
        show(root, path, is_kept=True)
    for path in settings["hidden"]:
        with suppress(FileNotFoundError):
            if Path(root + path).is_file():
                mount("/dev/null", root + path, None, MS_BIND)
    # The loader reads /proc/self/exe to find libraries at $ORIGIN/../lib. pg_ctl and postgres are in the same folder.
    itself = Path(root, "proc/self/exe")
    itself.parent.mkdir(parents=True)
    itself.symlink_to(os.path.realpath(program))
    os.umask(before)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def enter_namespaces(settings: dict[str, Any]) -> None:
    """Enter new namespaces."""
    own_user = "uid" not in settings
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | (CLONE_NEWUSER if own_user else 0))
    if own_user:
        # Map the user to itself: a server refuses to run as root, and executing the program drops the capabilities.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)


def confine(settings: dict[str, Any], program: str) -> None:
    """Confine this process, which then executes the program."""
    if "root" in settings:
        enter_namespaces(settings)
        hide_all(settings, program)
    if "uid" in settings:
        os.setgroups([])
        os.setresgid(settings["gid"], settings["gid"], settings["gid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    # Only Linux has prctl.
    if hasattr(libc, "prctl"):
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main() -> None:
    """Run the program, confined."""
    try:
        confine(json.loads(sys.argv[1]), sys.argv[2])
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        # Don't use str(error), which includes the number.
        reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        sys.stderr.write(f"{reason}\n")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()

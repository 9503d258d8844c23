"""The session folder: one folder for all temporary files of a command and its children, deleted when the command ends.

mkdtemp creates the folder with mode 0700 and an unpredictable name, so nobody can plant a folder for a command to use.
The running command holds an flock on the folder. If a command was killed, the user's next command finds the folder
unlocked and deletes it, unless the command's JVM may still be starting. A pid would prove nothing, because by now it
may belong to a different process.

Hosts may share the folder for temporary files, but they don't see each other's locks. So the folder's name identifies
the host (by hostname and machine id) and its boot. A command deletes only folders from its own boot, for which the lock
is conclusive, and folders that its host left behind in an earlier boot. Hosts with the same hostname and machine id
must not share the folder.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from cutline.fleet.own_files import cache_folder
from cutline.fleet.own_process import is_replaceable
from cutline.storage.errors import RefusedError, SnapshotError

PREFIX = "snapshot-session-"
NAME_LETTERS = 5
# Spark separates the folders in spark.local.dir by it; nothing escapes it.
SEPARATOR = ","
# After this time, even on the busiest machine, a JVM is either running or will never start.
JVM_SECONDS_MAX = 600
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# This file marks a fleet folder (embedded/folder.py), whose servers run until they are stopped.
FLEET = "demo.json"
MACHINE_ID = Path("/etc/machine-id")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# The folder for temporary files that contains the session folder.
_outside: list[str] = []
# Deletes this process's session folder, if it has one.
_begun = ExitStack()


class NoTemporaryFolderError(RefusedError):
    """No folder is safe for temporary files."""


def begin_session() -> None:
    """Create this process's session folder; `end_session` deletes it. Raises NoTemporaryFolderError."""
    _begun.enter_context(session_folder())


def end_session() -> None:
    """Delete this process's session folder, if it exists."""
    _begun.close()


@contextmanager
def session_folder() -> Iterator[Path]:
    """Create the session folder, and delete it at the end; TMPDIR and Python's `tempfile` use it in between.

    First the folders of killed commands are deleted. Raises NoTemporaryFolderError.
    """
    try:
        parent = safe_parent()
        delete_dead_sessions(parent)
        claim = claimed_folder(parent)
        folder = claim.__enter__()
    except OSError as error:
        raise NoTemporaryFolderError(
            f"there is no folder for temporary files: {error}",
            hint="set TMPDIR to a folder of yours with free space",
        ) from error
    before = os.environ.get("TMPDIR")
    chosen = tempfile.tempdir
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    _outside.append(str(parent))
    try:
        yield folder
    finally:
        tempfile.tempdir = chosen
        _outside.pop()
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        claim.__exit__(None, None, None)


def lasting_folder() -> str:
    """Return the folder for files that the user reads after the command has ended, such as the traceback of a bug."""
    return _outside[-1] if _outside else tempfile.gettempdir()


def safe_parent() -> Path:
    """Return the folder for temporary files; if other users can replace files there, warn and return an alternative.

    The path contains no links. Raises NoTemporaryFolderError if no alternative is safe, or if Spark could not use the
    folder.
    """
    usual = Path(tempfile.gettempdir()).resolve()
    if SEPARATOR in str(usual):
        raise NoTemporaryFolderError(
            f"the path of {usual}, the folder for temporary files, contains a comma: Spark would take it for two"
            " folders, and leave files in both",
            hint="set TMPDIR to a folder whose path contains no comma",
        )
    if not is_replaceable(usual / PREFIX):
        return usual
    problem = f"other users of the machine can replace files in {usual}, the folder for temporary files"
    for candidate in _other_parents():
        with suppress(OSError):
            parent = candidate.resolve(strict=True)
            if (
                SEPARATOR not in str(parent)
                and os.access(parent, os.W_OK | os.X_OK)
                and not is_replaceable(parent / PREFIX)
            ):
                sys.stderr.write(f"warning: {problem}: using {parent} instead\n")
                return parent
    raise NoTemporaryFolderError(
        problem,
        hint="set TMPDIR to a folder that belongs, like all folders above it, to you or root; or set the sticky bit:"
        " chmod +t",
    )


def _other_parents() -> Iterator[Path]:
    yield Path("/var/tmp")
    if (caches := cache_folder()) is not None:
        yield caches
    # This folder comes last because it is in memory.
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime)


@cache
def _host_and_boot() -> tuple[str, str]:
    """Return short names for this host and its current boot; without a boot id, all boots have the same name."""
    texts = []
    for file in (MACHINE_ID, BOOT_ID):
        try:
            texts.append(file.read_text())
        except OSError:
            texts.append("")
    machine_id, boot_id = texts
    host = f"{platform.node()} {machine_id}"
    return _short(host), _short(boot_id or host)


def _short(text: str) -> str:
    # The names must be short: the path of a Unix socket is limited to about 100 bytes.
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:NAME_LETTERS].decode().lower()


def _can_judge(name: str) -> bool:
    """Whether a free lock proves that this session folder's command is dead."""
    host, boot = _host_and_boot()
    # The name is snapshot-session-HHHHHBBBBB-random.
    its_host, its_boot = name[len(PREFIX) :][:NAME_LETTERS], name[len(PREFIX) + NAME_LETTERS :][: NAME_LETTERS + 1]
    return name.startswith(PREFIX) and (its_boot == f"{boot}-" or its_host == host)


@contextmanager
def claimed_folder(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent` that counts as in use while this process is running; delete it at the end."""
    folder, descriptor = _claim(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _claim(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{''.join(_host_and_boot())}-", dir=parent))
        try:
            # The descriptor is not inheritable, so a child that survives this process does not hold the lock.
            descriptor = os.open(folder, FOLDER_FLAGS)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        # Another command mistook the folder for a dead command's before it was locked.
        os.close(descriptor)


def delete_dead_sessions(parent: Path) -> None:
    """Delete the folders that this user's killed commands left in `parent`, and end the servers that run there.

    Other hosts' folders stay.
    """
    dead: list[Path] = []
    # Listing the folder may be forbidden.
    with suppress(OSError), os.scandir(parent) as entries:
        dead = [Path(entry.path) for entry in entries if _can_judge(entry.name)]
    for folder in dead:
        # A folder that can't be deleted must not stop this command, so it is left to a later command.
        with suppress(OSError, SnapshotError):
            _delete_if_dead(folder)


def _delete_if_dead(folder: Path) -> None:
    descriptor = os.open(folder, FOLDER_FLAGS)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _awaits_jvm(folder):
                _delete_fleets(folder)
                shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _awaits_jvm(folder: Path) -> bool:
    """Whether a JVM that the killed command was starting may still write its connection file there.

    Such a JVM ends once it has written the file and nobody connects. Without the folder it would never end
    (spark/start.py).
    """
    # pyspark creates a separate folder for that file.
    for place in folder.glob("tmp*"):
        with suppress(OSError):
            if not any(place.iterdir()) and time.time() - place.stat().st_mtime < JVM_SECONDS_MAX:
                return True
    return False


def _delete_fleets(folder: Path) -> None:
    for state in folder.glob(f"*/*/{FLEET}"):
        from cutline.embedded.fleet import stop_fleet

        stop_fleet(state.parent, delete=True)

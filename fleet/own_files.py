"""Files and folders that no other user on the machine can change, and files that are written atomically.

The JVM runs files from the cache folder, so the folder is used only if no other user could have put files there.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cutline.fleet.own_process import is_own_alone, is_replaceable, real_path
from cutline.storage.errors import UsageError

NAME = "cutline"


def private_folder(variable: str, default: str) -> Path | None:
    """Return Cutline's folder inside the folder that the environment variable names, or inside `default`.

    The folder is created if necessary. Returns None if it can't be created, or if other users can change it.
    """
    folder = find_private_folder(variable, default)
    return None if isinstance(folder, str) else folder


def find_private_folder(variable: str, default: str) -> Path | str:
    """Like `private_folder`, but instead of None, return a message that names the folder and the reason."""
    path = os.environ.get(variable) or default
    try:
        folder = Path(path).expanduser().resolve() / NAME
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own_alone(folder) or is_replaceable(folder):
            return f"other users can change {folder}, or a folder above it"
    except OSError as error:
        return f"folder {error.filename or path} can't be created or read: {error.strerror}"
    except RuntimeError:
        return f"folder {path} does not exist: this user has no home directory"
    return folder if os.access(folder, os.W_OK) else f"folder {folder} can't be written to"


def cache_folder() -> Path | None:
    """Return Cutline's folder for the user's caches, as `private_folder` does."""
    return private_folder("XDG_CACHE_HOME", "~/Library/Caches" if sys.platform == "darwin" else "~/.cache")


@contextmanager
def replaced_file(path: Path, mode: int | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a new version of the file, which replaces the file unless the block raises.

    If the file can't be written, raises UsageError, if possible before the block starts. The file gets the permissions
    `mode`, or keeps its own. If `path` is a symbolic link owned by this user, its target is replaced. Until the block
    ends, the new version is in a hidden file with a different suffix. Raw text (nodes.encodings) is written as its
    bytes.
    """
    with _naming_file(path):
        target = _target_of(path)
        kept = _mode_of(target)
        handle, partial = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        out = os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape")
        try:

            def write(text: str) -> None:
                with _naming_file(path):
                    out.write(text)

            yield write
            with _naming_file(path):
                out.flush()
                os.fchmod(out.fileno(), kept if mode is None else mode)
                os.fsync(out.fileno())
        finally:
            # Closing retries a failed flush, and the second error would hide the first.
            with suppress(OSError):
                out.close()
        with _naming_file(path):
            Path(partial).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(partial).unlink()
        raise


def _target_of(path: Path) -> Path:
    """Return the file to replace.

    A symbolic link owned by another user is refused: it could point to any of this user's files.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            if status.st_uid not in (0, os.geteuid()):
                raise OSError(0, "it is another user's symbolic link")
            return real_path(path)
    return real_path(path.parent) / path.name


def _mode_of(target: Path) -> int:
    try:
        mode_bits = target.stat().st_mode
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    if not stat.S_ISREG(mode_bits):
        raise OSError(0, "it is not a regular file")
    return stat.S_IMODE(mode_bits)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="name a file that you can write to") from error

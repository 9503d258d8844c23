"""The process that forks an executor's Python workers if Cutline comes in an archive from `snapshot cluster pack`.

Spark sends this file to executors that do not have Cutline yet, so it imports only Python's standard library.

The archive is unpacked once per user and machine, into a folder in the user's cache that is named after the archive's
digest; later executors don't fetch it again. A process that searches, unpacks or removes archives holds an flock on the
folder of all archives, and a process that uses an archive holds a shared flock on the archive's folder. A folder is
renamed to the digest only when it is complete and on disk: anything that a killed executor leaves behind has a
different name, and the next executor removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import tarfile
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

# An executor's environment variables: the archive's SHA-256, the URL at which the driver serves it, and the reason why
# it can't be used, if any.
DIGEST, URL, PROBLEM = "CUTLINE_ARCHIVE", "CUTLINE_ARCHIVE_URL", "CUTLINE_ARCHIVE_PROBLEM"
SILENT_SECONDS_MAX = 60
# Different versions or fleets may use the same machine.
UNUSED_SECONDS_MAX = 30 * 24 * 3600
PIECE_BYTES = 1 << 20
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def archives_folder() -> Path:
    """Return the folder for all of this user's archives, created if necessary.

    It is inside the executor's own folder if the user has no home or no writable cache, or if other users could change
    the cache's contents.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "cutline" / "archives"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_safe(folder) and os.access(folder, os.W_OK):
            return folder
    folder = Path("archives").resolve()
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def unpack_archive(digest: str, url: str, archives: Path) -> Path:
    """Return the folder in `archives` that contains the unpacked archive; if it is missing, fetch it from `url`.

    No process removes the folder until this process and all its children have ended. Raises OSError.
    """
    folder = archives / digest
    everything = os.open(archives, FOLDER_FLAGS)
    try:
        # Another executor may be unpacking the archive.
        fcntl.flock(everything, fcntl.LOCK_EX)
        _remove_others(archives, folder)
        if not folder.is_dir():
            _fetch(digest, url, folder)
        os.utime(folder)
        fcntl.flock(os.open(folder, FOLDER_FLAGS), fcntl.LOCK_SH)
    finally:
        os.close(everything)
    return folder


def _fetch(digest: str, url: str, folder: Path) -> None:
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        file, digest_of_file = partial / "archive", hashlib.sha256()
        # The proxies in the environment are not meant for requests to the driver.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=SILENT_SECONDS_MAX) as body, file.open("wb") as out:
            while piece := body.read(PIECE_BYTES):
                digest_of_file.update(piece)
                out.write(piece)
        if digest_of_file.hexdigest() != digest:
            raise OSError("it was truncated or changed in transit")
        unpacked = partial / "unpacked"
        unpacked.mkdir(0o700)
        with tarfile.open(file) as archive:
            # Python 3.11.3 and older have no filters. The digest has already shown that this is the driver's archive.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(unpacked)
        os.sync()
        unpacked.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_others(archives: Path, kept: Path) -> None:
    """Remove the remains of killed processes, and archives that nobody has used for UNUSED_SECONDS_MAX."""
    for folder in archives.iterdir():
        removed = folder
        if re.fullmatch("[0-9a-f]{64}", folder.name):
            if folder == kept or _is_wanted(folder):
                continue
            # Rename the folder first, so that a half-deleted folder is never taken for a complete one.
            removed = archives / f"removed-{folder.name}"
            with suppress(OSError):
                folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _is_wanted(folder: Path) -> bool:
    descriptor = os.open(folder, FOLDER_FLAGS)
    try:
        if time.time() - os.fstat(descriptor).st_mtime < UNUSED_SECONDS_MAX:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_safe(folder: Path) -> bool:
    """Whether nobody else can replace `folder` or change its contents, by the same rule as in fleet/own_files.py."""
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    above = [parent.lstat() for parent in folder.parents]
    return all(
        one.st_uid in trusted and (not one.st_mode & stat.S_IWOTH or one.st_mode & stat.S_ISVTX) for one in above
    )


def use_archive() -> None:
    """Make the archive importable in this process and its children; on an error, set PROBLEM to the reason."""
    url = os.environ.get(URL, "")
    try:
        sys.path.insert(0, str(unpack_archive(os.environ[DIGEST], url, archives_folder())))
    except Exception as error:  # noqa: BLE001  # the driver asks for the problem, and names this executor
        os.environ[PROBLEM] = f"{url}: {error}"


if __name__ == "__main__":
    use_archive()
    from pyspark.daemon import manager

    manager()

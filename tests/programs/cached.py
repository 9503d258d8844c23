"""Where a program of the tests is kept, and how several processes install it once.

A program in a folder that others share could be planted, and would be run: hence the user's own cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cutline.fleet.own_files import cache_folder
from tests.programs.lacking import skip_without

INSTALL_SECONDS_MAX = 900
# What go and npm report if they can't download: such a machine can't install the program, as if it had no go or npm.
NO_NETWORK = (
    "dial tcp", "no such host", "i/o timeout", "connection refused", "TLS handshake", "proxyconnect",
    "ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN",
)  # fmt: skip


class NotInstallableError(Exception):
    """The program can't be installed on this machine; the message says why."""


@cache
def own_folder() -> Path:
    """Make a folder for the programs of this run."""
    return Path(tempfile.mkdtemp(prefix="cutline-programs-"))


def cached_path(name: str, version: str) -> Path:
    """The path of a program, or of its folder, once it is installed."""
    return (cache_folder() or own_folder()) / f"{name}-{version}-{sysconfig.get_platform()}"


def require_program(name: str, cached: Path) -> Path:
    """Return the program of the cache folder, or else of the PATH; skip the calling test if there is none."""
    found = str(cached) if cached.exists() else shutil.which(name)
    if found is None:
        skip_without(name, "it is neither in the cache folder nor on the PATH; to install it: make stores")
    return Path(found)


def check_installed(returncode: int, output: str) -> None:
    """Raise NotInstallableError if a program could not be downloaded; fail if its installation failed otherwise."""
    if returncode and any(words in output for words in NO_NETWORK):
        raise NotInstallableError(f"it can't be downloaded: {output.strip().splitlines()[-1]}")
    assert returncode == 0, output


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file for the block: one process installs, the others wait for it."""
    deadline = time.monotonic() + INSTALL_SECONDS_MAX
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {INSTALL_SECONDS_MAX} seconds") from None
                time.sleep(0.2)
        yield

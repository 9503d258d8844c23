"""A class-data archive for Spark's JVM: a memory image of its classes, which halves the start time.

A JVM writes the archive to the user's cache when it ends, once for each combination of Java and Spark; later JVMs map
it. The archive only affects speed: a JVM ignores an archive that does not fit, and without an archive Spark starts more
slowly. `cutline.spark.record_archive` writes the archive ahead of time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

from cutline.fleet.own_files import cache_folder
from cutline.fleet.own_process import is_own_alone
from cutline.spark.java import Java

DUMP_SECONDS_MAX = 60
# A JVM writes the header last: if the file still begins with zeros after this time, the JVM has died.
WRITING_SECONDS_MAX = 300
ARCHIVES_KEPT = 3
# A JVM that ends while it is starting writes less than this. With a context it writes 59 MB, after plain jobs 68 MB,
# and with Spark SQL 150 MB or more.
ARCHIVE_BYTES_MIN = 50_000_000


def archive_options(java: Java, spark_home: Path, spark_version: str, added: str = "") -> list[str]:
    """Return the JVM options that use the archive or create it; empty if there is no suitable cache folder.

    `added` is what settings and variables add to Spark's own class path: a JVM with another class path ignores the
    archive.
    """
    folder = cache_folder()
    # The JVM's options separate the names of two archives by a colon.
    if folder is None or os.pathsep in str(folder):
        return []
    try:
        # An archive is valid only for the jar files from which it was made, so reinstalling Spark invalidates it.
        installed = (spark_home / "jars").stat().st_mtime_ns
        identity = f"{java.home} {java.version} {spark_home} {installed} {added}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        archive = folder / f"spark-{spark_version}-java-{java.major}-{key}.jsa"
        _delete_foreign(folder)
        if archive.exists() and not _is_of_few_classes(archive):
            return _options_of_existing(archive)
        _delete_oldest(folder)
        return [*_base_archive(java, folder, key), f"-XX:ArchiveClassesAtExit={archive}"]
    except (OSError, subprocess.SubprocessError):
        return []


def is_recording(options: list[str]) -> bool:
    """Whether a JVM with these options writes an archive when it ends, which takes a few seconds."""
    return any(option.startswith("-XX:ArchiveClassesAtExit") for option in options)


def _options_of_existing(archive: Path) -> list[str]:
    if _is_complete(archive):
        return [f"-XX:SharedArchiveFile={archive}"]
    if time.time() - archive.stat().st_mtime > WRITING_SECONDS_MAX:
        archive.unlink()
    return []


def _is_complete(archive: Path) -> bool:
    with archive.open("rb") as file:
        return bool(file.read(4).strip(b"\0"))


def _is_of_few_classes(archive: Path) -> bool:
    """Delete the archive if its JVM was killed or failed too early; return whether the archive was deleted."""
    if archive.stat().st_size >= ARCHIVE_BYTES_MIN or not _is_complete(archive):
        return False
    archive.unlink()
    return True


def _delete_foreign(folder: Path) -> None:
    """Delete archives that other users may have written while they had access to the folder: a JVM would run them."""
    for archive in folder.glob("*.jsa"):
        if not is_own_alone(archive):
            archive.unlink()


def _delete_oldest(folder: Path) -> None:
    """Make room for a new archive (about 150 MB) and for an archive of Java's own classes (14 MB)."""
    archives = sorted(folder.glob("spark-*.jsa"), key=lambda archive: archive.stat().st_mtime)
    kept = {_key_of(archive) for archive in archives[-ARCHIVES_KEPT + 1 :]}
    for archive in (*archives, *folder.glob("java-*.jsa")):
        if _key_of(archive) not in kept:
            archive.unlink(missing_ok=True)


def _key_of(archive: Path) -> str:
    """Return the key that an archive shares with its base archive, which contains Java's own classes."""
    return archive.stem.rpartition("-")[2]


def _base_archive(java: Java, folder: Path, key: str) -> list[str]:
    """Return options for a runtime that lacks the archive of Java's own classes, on which ours is based."""
    if (java.home / "lib" / "server" / "classes.jsa").exists():
        return []
    base = folder / f"java-{java.major}-{key}.jsa"
    if not base.exists():
        dump = [str(java.home / "bin" / "java"), "-Xshare:dump", f"-XX:SharedArchiveFile={base}"]
        subprocess.run(dump, capture_output=True, timeout=DUMP_SECONDS_MAX, check=True)
    return [f"-XX:SharedArchiveFile={base}"]

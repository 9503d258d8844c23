"""The servers that are installed on this machine, and their features.

    SNAPSHOT_TEST_PG_BINS=/usr/lib/postgresql/16/bin:/opt/17/bin    more servers, for the tests of several versions
    SNAPSHOT_TEST_SERVERS=required                                  a missing server fails the run at its start

The features of a server are found out by starting it: builds are linked with different libraries, and a server also
lists extensions that can't be created because a library is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.fleet.own_files import cache_folder
from cutline.fleet.own_process import is_own_alone
from cutline.nodes.programs import PROGRAMS as CLIENT_PROGRAMS
from cutline.nodes.programs import shared_temporary_directory, wheel_bin_directory
from tests.servers.packages import WHOLE, WITH_ICU, Package

REQUIRED = os.environ.get("SNAPSHOT_TEST_SERVERS") == "required"
MORE_FOLDERS = tuple(Path(one) for one in os.environ.get("SNAPSHOT_TEST_PG_BINS", "").split(os.pathsep) if one)
# The features that the server reported, in a file next to `bin`.
SAID = "server.json"
# Features that not all builds have, each with a statement that only a server with the feature accepts.
TRIED = {
    "icu": "CREATE COLLATION tried (provider = icu, locale = 'und')",
    "xml": "SELECT '<a/>'::xml",
    "lz4": "CREATE TEMP TABLE tried (v text COMPRESSION lz4)",
}
CONTRIB = frozenset({"btree_gist", "citext", "hstore", "pg_trgm", "pgcrypto", "postgres_fdw"})


@dataclass(frozen=True, slots=True)
class Server:
    """A server with all its programs in the folder `programs`; `has` is a subset of icu, xml, lz4 and tls."""

    version: str
    programs: Path
    has: frozenset[str]
    extensions: frozenset[str]

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    @property
    def has_clients(self) -> bool:
        """Whether pg_dump and pg_restore of this version are installed."""
        return all((self.programs / name).exists() for name in CLIENT_PROGRAMS)

    @property
    def has_contrib(self) -> bool:
        """Whether the extensions of PostgreSQL's own sources can be created."""
        return self.extensions >= CONTRIB

    def __str__(self) -> str:
        """The version and features, as in the names of tests."""
        return "-".join([self.version, *sorted(self.has)])


def servers_folder() -> Path | None:
    """Return the folder of the installed servers: the user's cache folder, which root's servers could not enter."""
    if os.geteuid() != 0:
        return cache_folder()
    folder = shared_temporary_directory() / "cutline-test-servers"
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder if is_own_alone(folder) else None


def place_of(package: Package) -> Path | None:
    """Return the folder of the package's server, whether or not it is installed; its name depends on its contents."""
    parent = servers_folder()
    kind = "icu" if package in WITH_ICU else "whole"
    return parent and parent / f"postgresql-{package.postgresql}-{kind}-{package.sha256[:16]}"


def installed(package: Package) -> Server | None:
    """Return the package's server, None if it is not installed."""
    place = place_of(package)
    if place is None or not (place / SAID).exists():
        return None
    said = json.loads((place / SAID).read_text())
    return Server(said["version"], place / "bin", frozenset(said["has"]), frozenset(said["extensions"]))


@cache
def ask(programs: Path) -> Server:
    """Start the server in a folder briefly, and find out its features."""
    parent = Path(tempfile.mkdtemp(prefix="cutline-asked-", dir=shared_temporary_directory()))
    # The server's account must pass through this folder.
    parent.chmod(0o711)
    try:
        fleet = start_fleet(
            parent / "fleet", shards=1, backups=0, settings={"fsync": "off"}, schema=False, programs={"s1": programs}
        )
        try:
            with psycopg.connect(fleet.primaries[0].dsn("postgres"), autocommit=True) as connection:
                return _ask(connection, programs)
        finally:
            stop_fleet(fleet.directory, delete=True)
    finally:
        shutil.rmtree(parent)


def has(connection: psycopg.Connection[Any], feature: str) -> bool:
    """Whether the server has the feature, one of TRIED."""
    return _accepts(connection, TRIED[feature])


def _ask(connection: psycopg.Connection[Any], programs: Path) -> Server:
    features = {feature for feature in TRIED if has(connection, feature)}
    (version, tls) = connection.execute(
        "SELECT split_part(current_setting('server_version'), ' ', 1), current_setting('ssl_library') <> ''"
    ).fetchall()[0]
    available = [name for (name,) in connection.execute("SELECT name FROM pg_available_extensions")]
    extensions = {name for name in available if _accepts(connection, f'CREATE EXTENSION "{name}" CASCADE')}
    return Server(version, programs, frozenset(features | ({"tls"} if tls else set())), frozenset(extensions))


def _accepts(connection: psycopg.Connection[Any], statement: str) -> bool:
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement.encode())
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile):
        return False
    except (
        psycopg.errors.ObjectNotInPrerequisiteState,
        psycopg.errors.UndefinedObject,
        psycopg.errors.RaiseException,
        psycopg.errors.InvalidParameterValue,
    ):
        # The extension must be loaded at the server's start, as pg_cron must, or its script is missing.
        return False
    except psycopg.errors.DuplicateObject:
        # plpgsql.
        return True
    return True


def by_major(packages: Sequence[Package]) -> Mapping[int, Server]:
    """Return the installed servers of these packages, by major version."""
    return {server.major: server for package in packages if (server := installed(package))}


MAJORS = tuple(package.major for package in WHOLE)
SERVERS = by_major(WHOLE)
ICU_SERVERS = by_major(WITH_ICU)
MISSING = tuple(package for package in (*WHOLE, *WITH_ICU) if installed(package) is None)


def require_server(major: int, *, icu: bool = False) -> Server:
    """Return the installed server of this version; skip the calling test if there is none."""
    server = (ICU_SERVERS if icu else SERVERS).get(major)
    if server is None:
        pytest.skip(f"PostgreSQL {major} is not installed{' with ICU' if icu else ''}; to install it: make servers")
    return server


def find_server(build: Package | Path) -> Server | None:
    """Return the server of a pinned package, or of a folder that the user named; None if there is none."""
    if isinstance(build, Package):
        return installed(build)
    return ask(build) if (build / "postgres").exists() else None


def server_of(build: Package | Path) -> Server:
    """Return the server of `build`; skip the calling test if there is none."""
    server = find_server(build)
    if server is None:
        pytest.skip(f"there is no PostgreSQL {id_of(build)}; to install 15 to 18: make servers")
    return server


def id_of(build: Package | Path) -> str:
    """Return the name of a build in the names of tests."""
    return str(build) if isinstance(build, Path) else f"{build.major}{'-icu' if build in WITH_ICU else ''}"


def header() -> list[str]:
    """Return the lines of a run's header that name the servers of its tests."""
    kinds = {"PostgreSQL": SERVERS, "with ICU": ICU_SERVERS}
    found = [f"{kind} {', '.join(one.version for one in some.values())}" for kind, some in kinds.items() if some]
    lines = [f"beside the wheel's: {'; '.join([*found, *map(str, MORE_FOLDERS)]) or 'no PostgreSQL'}"]
    if MISSING:
        missing = ", ".join(one.postgresql for one in MISSING)
        lines.append(f"missing: PostgreSQL {missing}; to install them: make servers")
    return lines


def check_required() -> None:
    """End the run if a required server is missing."""
    if REQUIRED and MISSING:
        missing = ", ".join(f"{one.name} {one.version}" for one in MISSING)
        raise pytest.UsageError(f"the tests require servers that are not installed: {missing}; run: make servers")


def wheel_server() -> Server:
    return ask(wheel_bin_directory())

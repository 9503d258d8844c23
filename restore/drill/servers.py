"""A drill's servers: one for each shard, in a temporary folder, for untrusted databases.

A role without privileges restores the databases, and code from the source runs only as that role. A superuser creates
this role, the snapshot's roles and the extensions, and connects to the databases only while they are empty. The servers
are always stopped and deleted at the end of the block. If the process is killed, the next command that uses temporary
files deletes them (spark/session_folder.py), provided that they are below that command's own folder for temporary
files.
"""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct, structs
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import stop_fleet
from cutline.embedded.folder import read_state
from cutline.embedded.sandbox import Confinement, SandboxedServer, UnconfinedError, find_confinement, start_sandboxed
from cutline.embedded.server import EmbeddedNode, ServerFailedError, stop_server
from cutline.fleet.config import DrillTable, Fleet, Node, remember_secrets_of
from cutline.fleet.progress import Progress
from cutline.nodes.connections import MAINTENANCE_DATABASE, connect
from cutline.nodes.programs import ProgramFailedError, check_programs_folder
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.drill.assertions import Reader
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.targets.obstacles import ObstaclesError, TargetLacksError
from cutline.restore.targets.requirements import DRILL_WITHOUT
from cutline.restore.targets.target import Superusers, Target, TargetUnfitError, mark_role, suffix_of, target_of
from cutline.spark.session_folder import lasting_folder
from cutline.storage.errors import RefusedError, SnapshotError, remember_secret
from cutline.storage.process_limits import says_full_disk

# Contrib modules that are not marked as trusted, but don't give unprivileged roles access to files, programs or
# connections.
CONTRIB = frozenset(
    {
        "amcheck",
        "autoinc",
        "bloom",
        "earthdistance",
        "insert_username",
        "intagg",
        "moddatetime",
        "pageinspect",
        "pg_buffercache",
        "pg_freespacemap",
        "pg_prewarm",
        "pg_stat_statements",
        "pg_surgery",
        "pg_visibility",
        "pg_walinspect",
        "pgrowlocks",
        "pgstattuple",
        "sslinfo",
    }
)
TERMINATE = "SELECT pg_terminate_backend(%s, %s)"
END_SECONDS_MAX = 10
PASSWORD_BYTES = 32
# Matches those hints of a restore that also apply to a drill.
DRILLS = re.compile(r"\[drill\]|^(?!.*--schema-only).*--allow-refused-ddl")


class DrillUnfitError(RefusedError):
    """The snapshot's databases can't be restored into a drill's servers."""


class DrillPlace(Struct, frozen=True):
    """The plan for restoring into a drill's servers; `make_reader` returns a Reader for the queries afterwards."""

    plan: RestorePlan
    make_reader: Callable[[Target], Reader]


def new_password() -> str:
    """Create a password that is masked in all errors."""
    password = secrets.token_hex(PASSWORD_BYTES)
    remember_secret(password)
    return password


def create_login(superuser: Node, role: str, password: str, attributes: str, *, mark: str = "") -> None:
    """Create a login role and `mark` it in the same transaction, without sending the plain password to the server."""
    with connect(superuser) as connection, connection.transaction():
        verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
        statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} ").format(
            sql.Identifier(role), sql.Literal(verifier.decode())
        )
        connection.execute(statement + sql.SQL(attributes))
        if mark:
            mark_role(connection, role, mark)


def end_session(node: Node, process: int) -> bool:
    """Terminate the session with this process id; return whether it ended in time."""
    with connect(node) as connection:
        return connection.execute(TERMINATE, (process, END_SECONDS_MAX * 1000)).fetchone() == (True,)


@contextmanager
def naming_unfit(snapshot: str) -> Iterator[None]:
    """Raise DrillUnfitError if a restore in the block is refused because of the drill's temporary servers."""
    try:
        yield
    except (TargetUnfitError, TargetLacksError, SchemaLoadError, ObstaclesError) as error:
        # Drop the other hints: they concern permanent servers, or steps that a drill does not have.
        hints = [line for line in error.hint.splitlines() if DRILLS.search(line)]
        obstacles: Any = error.details.get("obstacles", [{"hint": error.hint}])
        if any(obstacle["hint"] != DRILL_WITHOUT for obstacle in obstacles):
            hints.append(f"or drill on servers of your own: snapshot drill {shlex.quote(snapshot)} --to FILE")
        hints[0] = hints[0].removeprefix("or ")
        raise DrillUnfitError(
            f"the snapshot can't be restored into a drill's servers: {error.message}",
            hint=list(dict.fromkeys(hints)),
            details=error.details,
        ) from error


DATABASE = "drill"
INSTALL = "name the programs of a PostgreSQL installation that has them: [drill] postgresql in fleet.toml"
# Durability is unnecessary, because the servers are deleted after the drill.
SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


def without_servers(source: Fleet, shards: tuple[str, ...]) -> Fleet:
    """Return a fleet with these primaries; their servers don't exist yet."""
    programs = source.nodes[0].programs
    return replace(source, nodes=tuple(Node(shard, f"dbname={DATABASE}", programs=programs) for shard in shards))


@contextmanager
def drill_servers(
    source: Fleet, plan: RestorePlan, extensions: frozenset[str], progress: Progress
) -> Iterator[DrillPlace]:
    """Start the servers for a plan whose target is `without_servers`; yield the plan with these servers as targets.

    Raises UnconfinedError, and any error of start_sandboxed.
    """
    rules = source.drill
    programs = check_programs_folder(Path(rules.postgresql)) if rules.postgresql else None
    folder = Path(tempfile.mkdtemp(prefix="cutline-drill-"))
    place = folder / "fleet"
    try:
        confinement = check_confinement(folder / "probe", rules, progress)
        ids = [target.node.id for target in plan.targets]
        with _naming_full_disk(place):
            made = start_sandboxed(place, ids, confinement, programs, SETTINGS, [source.path])
        yield _place(plan, made, extensions)
    finally:
        if read_state(place) is not None:
            stop_fleet(place, delete=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _naming_full_disk(place: Path) -> Iterator[None]:
    """If servers can't be created because the disk is full that has their data, name their folder in the hint."""
    try:
        yield
    except (ProgramFailedError, ServerFailedError) as error:
        state = read_state(place)
        if state is not None and says_full_disk(f"{error.details}"):
            # Servers that root starts have their data where their account may enter.
            is_temporary = place in state.places.nodes.parents
            where = lasting_folder() if is_temporary else str(state.places.nodes.parent)
            other = ", or set TMPDIR to a folder with more space" * is_temporary
            error.hint = f"free space in {where}, where the drill's servers have their data{other}"
        raise


def check_confinement(folder: Path, rules: DrillTable, progress: Progress) -> Confinement:
    """Find a confinement for the servers by trial runs in a new folder.

    If none works, raises UnconfinedError unless `rules` permit unconfined servers.
    """
    folder.mkdir()
    confinement = find_confinement(folder)
    if confinement.is_none and not rules.allow_unconfined:
        raise UnconfinedError(
            "a drill's servers would run as this user and could read the user's files, because the kernel does not"
            f" allow namespaces: {confinement.lacking}",
            hint=[
                "allow user namespaces, or drill as root, so that the servers run as a separate user",
                "or, if this user can read nothing but the store, as in a container, set [drill] allow_unconfined ="
                " true",
            ],
        )
    if confinement.is_none:
        progress.note("the drill's servers are not confined: they run as this user (allow_unconfined in fleet.toml)")
    return confinement


def _place(plan: RestorePlan, made: list[SandboxedServer], extensions: frozenset[str]) -> DrillPlace:
    # Use random names, because the snapshot may have roles with any name. One role restores; the other runs the
    # queries.
    role, password = f"cutline_drill_{suffix_of(plan.intent.id)}", new_password()
    reader = f"{role}_reader"
    nodes, superusers = list[Node](), dict[str, Node]()
    for target, server in zip(plan.targets, made, strict=True):
        node = replace(target.node, dsn=server.dsn(DATABASE, role, password))
        superuser = replace(target.node, dsn=server.dsn(MAINTENANCE_DATABASE))
        remember_secrets_of(superuser.dsn)
        create_login(superuser, role, password, "CREATEDB")
        superusers[target.shard] = superuser
        nodes.append(node)
    targets = tuple(target_of(node.id, node, (), plan.intent.id) for node in nodes)
    servers = {one.shard: server.node for one, server in zip(targets, made, strict=True)}
    folders = {shard: server.data_directory for shard, server in servers.items()}
    plan = structs.replace(
        plan,
        target_fleet=replace(plan.target_fleet, nodes=tuple(nodes)),
        targets=targets,
        superusers=Superusers(superusers, role, extensions, folders, install=INSTALL, creates_tablespaces=True),
    )
    return DrillPlace(
        plan, lambda target: _make_reader(target.node, superusers[target.shard], servers[target.shard], reader)
    )


def _make_reader(node: Node, superuser: Node, server: EmbeddedNode, role: str) -> Reader:
    """Create a role that may read everything but write nothing; return its Reader, whose `end` may stop the server."""
    password = new_password()
    create_login(superuser, role, password, "BYPASSRLS IN ROLE pg_read_all_data")
    dsn = make_conninfo(node.dsn, user=role, password=password)
    return Reader(replace(node, dsn=dsn), partial(end_in_any_case, superuser, server))


def end_in_any_case(superuser: Node, server: EmbeddedNode, process: int) -> bool:
    """Terminate the session with this process id, or else stop its server; return whether that was necessary."""
    try:
        has_ended = end_session(superuser, process)
    except (SnapshotError, psycopg.Error):
        # The snapshot owners' code may also have used up the resources that a superuser's session needs.
        has_ended = False
    return not has_ended and stop_server(server, immediate=True)

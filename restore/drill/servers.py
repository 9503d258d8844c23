"""The servers of a drill: one for each shard, in a temporary folder, for untrusted databases.

The databases are restored by a role without privileges, in which alone code of the source runs; a superuser makes that
role, the snapshot's roles and its extensions, and enters no database of the source. However the block ends, the servers
are stopped and deleted. If the process is killed, the next command that uses temporary files does it
(spark/session_folder.py), as long as the folder is below the command's own.
"""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import stop_fleet
from cutline.embedded.folder import read_state
from cutline.embedded.sandbox import Confinement, SandboxedServer, UnconfinedError, find_confinement, start_sandboxed
from cutline.embedded.server import EmbeddedNode, stop_server
from cutline.fleet.config import DrillTable, Fleet, Node, remember_secrets_of
from cutline.fleet.progress import Progress
from cutline.nodes.connections import MAINTENANCE_DATABASE, connect
from cutline.nodes.programs import check_programs_folder
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.drill.assertions import Reader
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.targets.obstacles import ObstaclesError, TargetLacksError
from cutline.restore.targets.requirements import DRILL_WITHOUT
from cutline.restore.targets.target import Superusers, Target, TargetUnfitError, mark_role, suffix_of, target_of
from cutline.storage.errors import RefusedError, SnapshotError, remember_secret

# Contrib modules that are not marked as trusted; to a role without privileges they give no file, program or connection.
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
# In the hints of a restore, what helps a drill too.
DRILLS = re.compile(r"\[drill\]|^(?!.*--schema-only).*--allow-refused-ddl")


class DrillUnfitError(RefusedError):
    """The servers of a drill can't hold the snapshot's databases."""


@dataclass(frozen=True, slots=True)
class DrillPlace:
    """Where a drill restores: the plan into its servers; `make_reader` lets a caller query a target afterwards."""

    plan: RestorePlan
    make_reader: Callable[[Target], Reader]


def new_password() -> str:
    """A password that no error shows."""
    password = secrets.token_hex(PASSWORD_BYTES)
    remember_secret(password)
    return password


def create_login(superuser: Node, role: str, password: str, attributes: str, *, mark: str = "") -> None:
    """Create a role that can log in, and `mark` it in the same transaction; the server's log has no password."""
    with connect(superuser) as connection, connection.transaction():
        verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
        statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} ").format(
            sql.Identifier(role), sql.Literal(verifier.decode())
        )
        connection.execute(statement + sql.SQL(attributes))
        if mark:
            mark_role(connection, role, mark)


def end_session(node: Node, process: int) -> bool:
    """End the session with this process id; return whether it has ended in time."""
    with connect(node) as connection:
        return connection.execute(TERMINATE, (process, END_SECONDS_MAX * 1000)).fetchone() == (True,)


@contextmanager
def naming_unfit(snapshot: str) -> Iterator[None]:
    """Raise DrillUnfitError if the servers made for the drill are why a restore in the block is refused."""
    try:
        yield
    except (TargetUnfitError, TargetLacksError, SchemaLoadError, ObstaclesError) as error:
        # What others say is about servers that somebody keeps, or steps that a drill does not have.
        hints = [line for line in error.hint.splitlines() if DRILLS.search(line)]
        obstacles: Any = error.details.get("obstacles", [{"hint": error.hint}])
        if any(obstacle["hint"] != DRILL_WITHOUT for obstacle in obstacles):
            hints.append(f"or drill on servers of your own: snapshot drill {shlex.quote(snapshot)} --to FILE")
        hints[0] = hints[0].removeprefix("or ")
        raise DrillUnfitError(
            f"the servers of a drill can't hold the snapshot: {error.message}",
            hint=list(dict.fromkeys(hints)),
            details=error.details,
        ) from error


DATABASE = "drill"
INSTALL = "name the programs of a PostgreSQL that has them: [drill] postgresql in fleet.toml"
# Nobody keeps their contents.
SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


def without_servers(source: Fleet, shards: tuple[str, ...]) -> Fleet:
    """A fleet of these primaries whose servers are still to be made."""
    programs = source.nodes[0].programs
    return replace(source, nodes=tuple(Node(shard, f"dbname={DATABASE}", programs=programs) for shard in shards))


@contextmanager
def drill_servers(
    source: Fleet, plan: RestorePlan, extensions: frozenset[str], progress: Progress
) -> Iterator[DrillPlace]:
    """Make the servers of a plan whose target is `without_servers`; yield the plan into them.

    Raises UnconfinedError, and any error of start_sandboxed.
    """
    rules = source.drill
    programs = check_programs_folder(Path(rules.postgresql).expanduser()) if rules.postgresql else None
    folder = Path(tempfile.mkdtemp(prefix="cutline-drill-"))
    place = folder / "fleet"
    try:
        confinement = check_confinement(folder / "probe", rules, progress)
        ids = [target.node.id for target in plan.targets]
        made = start_sandboxed(place, ids, confinement, programs, SETTINGS, [source.path])
        yield _place(plan, made, extensions)
    finally:
        if read_state(place) is not None:
            stop_fleet(place, delete=True)
        shutil.rmtree(folder, ignore_errors=True)


def check_confinement(folder: Path, rules: DrillTable, progress: Progress) -> Confinement:
    """The confinement of the servers, tried in a new folder; raise UnconfinedError unless `rules` allow none."""
    folder.mkdir()
    confinement = find_confinement(folder)
    if confinement.is_none and not rules.allow_unconfined:
        raise UnconfinedError(
            "a drill's servers would run as this user, whose files they could read, and the kernel gives them no"
            f" namespaces: {confinement.lacking}",
            hint=[
                "allow user namespaces, or drill as root, which can give the servers a user of their own",
                "if this user can read nothing but the store, as in a container: [drill] allow_unconfined = true",
            ],
        )
    if confinement.is_none:
        progress.note("the drill's servers are not confined: they run as this user (allow_unconfined in fleet.toml)")
    return confinement


def _place(plan: RestorePlan, made: list[SandboxedServer], extensions: frozenset[str]) -> DrillPlace:
    """The plan into servers that were made for it."""
    # Drawn: the snapshot may have roles of any name. One role restores, the other asks.
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
    plan = replace(
        plan,
        target_fleet=replace(plan.target_fleet, nodes=tuple(nodes)),
        targets=targets,
        superusers=Superusers(superusers, role, extensions, folders, install=INSTALL),
    )
    return DrillPlace(
        plan, lambda target: _make_reader(target.node, superusers[target.shard], servers[target.shard], reader)
    )


def _make_reader(node: Node, superuser: Node, server: EmbeddedNode, role: str) -> Reader:
    """Make the role that may read everything, and no more; its session a superuser's ends, or the end of the server."""
    password = new_password()
    create_login(superuser, role, password, "BYPASSRLS IN ROLE pg_read_all_data")
    dsn = make_conninfo(node.dsn, user=role, password=password)
    return Reader(replace(node, dsn=dsn), partial(end_in_any_case, superuser, server))


def end_in_any_case(superuser: Node, server: EmbeddedNode, process: int) -> bool:
    """End the session with this process id, or else stop its server; return whether that was needed."""
    try:
        has_ended = end_session(superuser, process)
    except (SnapshotError, psycopg.Error):
        # Code of the owners may have used up the resources of a superuser's session, too.
        has_ended = False
    return not has_ended and stop_server(server, immediate=True)

"""The servers of a drill: one for each shard, in a temporary folder, for untrusted databases (embedded/sandbox.py).

The databases are restored by a role without privileges, in which alone code of the source runs; a superuser makes that
role, the snapshot's roles and its extensions, and enters no database of the source. However the block ends, the servers
are stopped and deleted. If the process is killed, the next command that uses temporary files does it
(cli/folders/session_folder.py), as long as the folder is below the command's own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import stop_fleet
from cutline.embedded.folder import read_state
from cutline.embedded.sandbox import Confinement, SandboxedServer, UnconfinedError, find_confinement, start_sandboxed
from cutline.embedded.server import EmbeddedNode, stop_server
from cutline.fleet.config import Fleet, Node
from cutline.fleet.fleet_file import DrillTable
from cutline.fleet.nodes.connections import MAINTENANCE_DATABASE
from cutline.fleet.programs.wheel import check_programs_folder
from cutline.fleet.progress import Progress
from cutline.fleet.variables import remember_secrets_of
from cutline.restore.drill.assertions import Reader
from cutline.restore.drill.place import DrillPlace, create_login, end_session, new_password
from cutline.restore.plan import RestorePlan
from cutline.restore.targets.superusers import Superusers
from cutline.restore.targets.target import suffix_of, target_of
from cutline.storage.errors import SnapshotError

DATABASE = "drill"
INSTALL = "name the programs of a PostgreSQL that has them: [drill] postgresql in fleet.toml"
# Nobody keeps what is in them.
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

    Raises UnconfinedError, and what start_sandboxed raises.
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
    """What the servers are confined by, tried in a new folder; raise UnconfinedError unless `rules` allow nothing."""
    folder.mkdir()
    found = find_confinement(folder)
    if found.is_none and not rules.allow_unconfined:
        raise UnconfinedError(
            "a drill's servers would run as this user, whose files they could read, and the kernel gives them no"
            f" namespaces: {found.lacking}",
            hint=[
                "allow user namespaces, or drill as root, which can give the servers a user of their own",
                "if this user can read nothing but the store, as in a container: [drill] allow_unconfined = true",
            ],
        )
    if found.is_none:
        progress.note("the drill's servers are not confined: they run as this user (allow_unconfined in fleet.toml)")
    return found


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
        # Code of the owners may have used up what a superuser's session needs, too.
        has_ended = False
    return not has_ended and stop_server(server, immediate=True)

"""`init`: see that the nodes and the store are fit for snapshots, and prepare both."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.config import Fleet
from fleet.label import own_label
from fleet.nodes.baseline import NodeIdentity
from fleet.nodes.lock import locked_fleet
from fleet.nodes.preconditions import check_nodes
from fleet.nodes.relation_locks import PUBLISHING, bound_lock_waits, raising_locked
from fleet.nodes.sessions import Sessions, open_sessions
from fleet.progress import Progress
from fleet.tables.groups import SchemaChangedError, Table, qualify, read_tables
from fleet.tables.publications import check_admissible, ensure_publications
from snapshots.ddl.attempts import PASSING
from snapshots.operations.majority import forget_nodes
from snapshots.records.store_identity import StoreIdentity, ensure_identity
from storage.probe import probe_store
from storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class InitReport:
    """What init found and did. `published` names the tables added to a publication, by primary.

    `deleting_refused` says why the store lets nothing be deleted, "" where it does.
    """

    store: StoreIdentity
    store_created: bool
    nodes: tuple[NodeIdentity, ...]
    groups: dict[str, list[str]]
    append_only: dict[str, list[str]]
    published: dict[str, list[str]]
    forgotten: list[str]
    deleting_refused: str = ""


def initialise(fleet: Fleet, progress: Progress, *, forgets_nodes: bool = False) -> InitReport:
    """Check every node and the store, then write fleet.json and the publications. Safe to repeat.

    Everything is checked before anything is changed. With `forgets_nodes` the primaries that fleet.toml names now
    are the baseline that operations are measured by from now on. Raises what the checks raise.
    """
    progress.step("check nodes")
    store = fleet.store.open()
    with open_sessions(fleet, fleet.nodes) as sessions:
        check_nodes(sessions)
        tables = {node: read_tables(connection, fleet.groups) for node, connection in sessions.primaries.items()}
        check_admissible(tables)
        progress.step("probe the store")
        refused = probe_store(store)
        identity, created = ensure_identity(store, fleet)
        progress.step("publish")
        published = {node: _published(sessions, node, identity.fleet_id, tables[node]) for node in sessions.primaries}
        forgotten = _forget(sessions, store) if forgets_nodes else []
        return InitReport(
            store=identity,
            store_created=created,
            nodes=tuple(sessions.identities.values()),
            groups={node: [table.group.name for table in found] for node, found in tables.items()},
            append_only={node: _append_only(found) for node, found in tables.items()},
            published=published,
            forgotten=forgotten,
            deleting_refused=refused.message if refused else "",
        )


def _published(sessions: Sessions, id_: str, fleet_id: str, tables: list[Table]) -> list[str]:
    node, connection = sessions.fleet.node(id_), sessions.connections[id_]
    names = [qualify(table.group) for table in tables]
    try:
        with raising_locked(node, "publishing tables", names, modes=PUBLISHING), connection.transaction():
            bound_lock_waits(connection)
            return ensure_publications(connection, fleet_id, tables)
    except PASSING as error:
        raise SchemaChangedError(
            f"node {id_}: tables can't be published: {' '.join(str(error).split())}",
            hint="repeat the command: its tables were changed meanwhile, or somebody has locked them in another order",
            details={"node": id_},
        ) from error


def _forget(sessions: Sessions, store: ObjectStore) -> list[str]:
    with locked_fleet(sessions, sessions.fleet.name, own_label("init")) as lock:
        return forget_nodes(store, {node: sessions.identities[node] for node in lock.granted})


def _append_only(tables: list[Table]) -> list[str]:
    return [table.group.name for table in tables if table.group.identity == "append_only"]

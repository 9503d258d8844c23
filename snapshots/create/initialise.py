"""`init`: check that the nodes and the store are fit for snapshots, and prepare both."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, cast

import psycopg
from msgspec import Struct, field
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo
from psycopg.sql import Literal

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import News, Progress
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.collation_versions import note_collation_versions
from cutline.nodes.connections import NodeUnreachableError, database_name
from cutline.nodes.groups import SchemaChangedError, Table, qualify, read_tables
from cutline.nodes.lock import lock_fleet
from cutline.nodes.preconditions import find_node_problems, find_session_problems
from cutline.nodes.privileges import find_large_object_problems, find_table_problems
from cutline.nodes.problems import (
    GRANT,
    NodeProblem,
    Purpose,
    addresses_of,
    connect_line,
    find_catalog_problems,
    quote,
    read_role,
    refuse_unfit,
)
from cutline.nodes.programs import check_programs, wheel_bin_directory
from cutline.nodes.publications import (
    NOWHERE,
    TableStamps,
    check_admissible,
    check_published,
    ensure_publications,
    other_publications_texts,
    publication_of,
    read_own_names,
)
from cutline.nodes.read_only import find_freeze_problems
from cutline.nodes.relation_locks import PUBLISHING, bound_lock_waits, raising_locked
from cutline.nodes.sessions import Sessions, open_sessions
from cutline.nodes.surroundings import SurroundingsWarning, find_warnings, read_surroundings, unlimited_text
from cutline.nodes.unmatched_patterns import UnmatchedPattern, note_unmatched
from cutline.snapshots.ddl.attempts import DDL_RACE_ERRORS, DROPPED_ERRORS
from cutline.snapshots.ddl.fingerprint import PUBLIC_CATALOGS
from cutline.snapshots.operations.majority import check_servers, forget_nodes, read_recorded_primaries
from cutline.snapshots.operations.slot_guard import KeptChain, how_to_free_slots, note_unknown_slots, read_kept_chains
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.end_marks import has_end
from cutline.snapshots.records.proven_chains import naming_contradictions, read_continued, snapshot_names
from cutline.snapshots.records.store_identity import (
    FLEET_KEY,
    StoreIdentity,
    check_identity_not_lost,
    check_takes_snapshots,
    ensure_identity,
    read_identity,
)
from cutline.storage.encryption.key_documents import ensure_data_key
from cutline.storage.errors import SnapshotError
from cutline.storage.local import LocalStore
from cutline.storage.probe import probe_store
from cutline.storage.store import DeletionRefusedError, ObjectStore

# Why the next increment copies a shard or a table again although its database is the same.
ALTERED = "was altered, dropped or replaced after the last commit"
PUT_BACK = "taken out of Cutline's publication and put back"


class CopyToRenew(Struct, frozen=True):
    """A node that the next increment of `snapshot` copies again, or copies for the first time, and the reason.

    It copies only these `tables`; all if there are none.
    """

    snapshot: str
    node: str
    reason: str
    tables: tuple[str, ...] = ()


class RenamedNode(Struct, frozen=True):
    """A node that `snapshot` knows by another id than fleet.toml, which gives it the id `listed`."""

    snapshot: str
    node: str
    listed: str


class AbsentStandby(Struct, frozen=True):
    """A standby of `primary` that init did without, and the reason; `action` is what to do there, "" if unknown."""

    node: str
    primary: str
    reason: str
    action: str = ""

    @property
    def text(self) -> str:
        """The reason, and what follows from it, as one line."""
        action = f" ({self.action})" if self.action else ""
        return (
            f"standby {self.node} is left out: {self.reason}{action}. Only its settings were not checked: init changes"
            " nothing on standbys. Creates do without it; once it is back, the next one checks and copies it"
        )


class InitReport(Struct, frozen=True):
    """The results of init.

    `published` lists the tables added to a publication, by primary. `deleting_refused` is the reason why the store
    refuses to delete objects, "" if it deletes them. `encryption_key` names the key of an encrypted store, "" if the
    store is not encrypted. `lacking` lists missing privileges that only some commands need. `too_old` lists the
    standbys that can't decode their WAL, as (primary, standby). `warnings` concern the servers' managers and settings.
    `to_copy` lists the copies that the next increments begin again, and `renamed` the nodes that their chains know by
    other ids. `addresses` are those of the primaries for psql, which after a failover are not the ones in fleet.toml.
    `unmatched` are the patterns that match no table; they have been noted. `absent` are the standbys that init did
    without.
    """

    store: StoreIdentity
    store_created: bool
    nodes: tuple[NodeIdentity, ...]
    groups: dict[str, list[str]]
    append_only: dict[str, list[str]]
    published: dict[str, list[str]]
    forgotten: list[str]
    deleting_refused: str = ""
    encryption_key: str = ""
    lacking: tuple[NodeProblem, ...] = ()
    too_old: tuple[tuple[str, str], ...] = ()
    warnings: tuple[SurroundingsWarning, ...] = ()
    to_copy: tuple[CopyToRenew, ...] = ()
    renamed: tuple[RenamedNode, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)
    unmatched: tuple[UnmatchedPattern, ...] = ()
    absent: tuple[AbsentStandby, ...] = ()


def initialise(fleet: Fleet, progress: Progress, *, forgets_nodes: bool = False) -> InitReport:
    """Check every node and the store, then write fleet.json and the publications. Safe to repeat.

    Everything is checked before anything is changed. A standby that is away is left out, as a create leaves it out,
    unless fleet.toml requires it. With `forgets_nodes`, record the primaries that fleet.toml names now, even if there
    are fewer than before. Raises the checks' errors.
    """
    # Imported here because it imports Arrow.
    from cutline.snapshots.create.absent_copies import repeat_without_failed

    def begin(before_storing: Callable[[], None]) -> InitReport:
        return _initialise(fleet, progress, before_storing, forgets_nodes=forgets_nodes)

    return repeat_without_failed(fleet, progress, begin, "init")


def _initialise(
    fleet: Fleet, progress: Progress, before_storing: Callable[[], None], *, forgets_nodes: bool
) -> InitReport:
    progress.step("check nodes")
    store, raw = fleet.store.open(), fleet.store.open_raw()
    key = fleet.encryption.read_key() if fleet.encryption else None
    if raw.exists(FLEET_KEY):
        check_takes_snapshots(read_identity(store, fleet), store)
    with (
        _naming_role(fleet),
        open_sessions(fleet, fleet.nodes, unfit_hint=GRANT, needs_all=True, spares_standbys=True) as sessions,
    ):
        # The next checks may refuse the tables because of such a pattern.
        unmatched = note_unmatched(sessions, fleet.groups, progress)
        lacking = check_fleet(sessions, _find_fleet_id(store, fleet), fleet.groups, progress)
        _note_programs(sessions, progress)
        tables = sessions.ask_primaries(lambda connection: read_tables(connection, fleet.groups))
        check_admissible(tables)
        check_identity_not_lost(store)
        before_storing()
        refused = _probe(raw, progress)
        if not forgets_nodes and _find_fleet_id(store, fleet) is not None:
            check_servers(read_recorded_primaries(store), sessions.identities)
        if key:
            ensure_data_key(raw, key)
        identity, created = ensure_identity(store, fleet)
        progress.step("update publications")
        published = sessions.ask_named_primaries(
            lambda node, connection: _update_publications(node, connection, identity.fleet_id, tables[node.id])
        )
        kept = read_kept_chains(store, sessions, progress)
        note_unknown_slots(kept, progress)
        for text in other_publications_texts(sessions.ask_primaries(read_own_names), identity.fleet_id):
            progress.note(text)
        to_copy, renamed = _find_copies_to_renew(store, sessions, kept, identity.fleet_id, tables)
        forgotten = _forget_nodes(sessions, store) if forgets_nodes else []
        note_collation_versions(sessions, progress)
        warnings = _find_surroundings_warnings(sessions, fleet, progress)
        return InitReport(
            store=identity,
            store_created=created,
            nodes=tuple(sessions.identities.values()),
            groups={node: [table.group.name for table in found] for node, found in tables.items()},
            append_only={node: _append_only_names(found) for node, found in tables.items()},
            published=published,
            forgotten=forgotten,
            deleting_refused=refused.message if refused else "",
            encryption_key=key.id if key else "",
            lacking=tuple(lacking),
            too_old=tuple((node.shard, node.id) for node in sessions.too_old),
            warnings=warnings,
            to_copy=to_copy,
            renamed=renamed,
            addresses=addresses_of(sessions.fleet.nodes),
            unmatched=tuple(unmatched),
            absent=tuple(
                AbsentStandby(node, sessions.fleet.node(node).shard, absence.reason, absence.remedy)
                for node, absence in sessions.absent.items()
            ),
        )


def _note_programs(sessions: Sessions, progress: Progress) -> None:
    """Check PostgreSQL's programs for every node; note those that were not installed with Cutline."""
    for node, programs in check_programs(sessions).items():
        if programs.folder != wheel_bin_directory():
            dumping = f"{programs.folder}/pg_dump, version {programs.version}"
            progress.note(News(f"the DDL of node {node} will be dumped by {dumping}"))


def _probe(raw: ObjectStore, progress: Progress) -> DeletionRefusedError | None:
    """Probe the store without encryption; return the error if it refuses to delete objects."""
    progress.step("probe the store")
    refused = probe_store(raw)
    if isinstance(raw, LocalStore) and raw.others_may:
        progress.note(
            f"other users of this machine may {raw.others_may} {raw.url}, which will hold whole databases;"
            f" to prevent this: chmod -R go= {shlex.quote(str(raw.root))}"
        )
    return refused


def _find_surroundings_warnings(
    sessions: Sessions, fleet: Fleet, progress: Progress
) -> tuple[SurroundingsWarning, ...]:
    """Return the warnings about the servers' managers and settings; note if retained WAL has no limit."""
    surroundings = read_surroundings(sessions)
    if unlimited := unlimited_text(fleet, surroundings):
        progress.note(News(unlimited))
    return tuple(find_warnings(fleet, surroundings))


def _find_copies_to_renew(
    store: ObjectStore,
    sessions: Sessions,
    kept: Iterable[KeptChain],
    fleet_id: str,
    tables: Mapping[str, list[Table]],
) -> tuple[tuple[CopyToRenew, ...], tuple[RenamedNode, ...]]:
    """Return the copies that the next increments begin again.

    Nodes have joined or were replaced, or a publication of their shard, or of a table, is another than at the last
    commit, no matter which command repaired it. Also returns the nodes that the chains know by other ids.

    The chains are those that have slots. An upgraded server may have lost them, so if one is not the recorded server,
    all chains are read. A chain that can't be read or continued is left to its next increment.
    """
    # Imported here because it imports Arrow.
    from cutline.snapshots.create.absent_copies import find_renewable
    from cutline.snapshots.create.renamed import find_renamed_of

    names = {one.snapshot for one in kept if one.snapshot and not one.is_failed and not one.removal_text}
    if read_recorded_primaries(store).others(sessions.identities):
        names |= set(snapshot_names(store))
    if not names:
        return (), ()
    stamps = sessions.ask_named_primaries(
        lambda node, connection: _read_stamps(node, connection, fleet_id, tables[node.id])
    )
    found, renamed = list[CopyToRenew](), list[RenamedNode]()
    for name in sorted(names):
        with suppress(SnapshotError), naming_contradictions(store, name):
            continued = read_continued(store, name)
            if not continued.full.only_cut and not has_end(store, name, continued.full.chain):
                ids = find_renamed_of(sessions, sessions.fleet, continued)
                in_chain = sessions.with_chain_ids(ids)
                renewable = find_renewable(in_chain, continued)
                found += [CopyToRenew(name, ids.get(node, node), reason) for node, reason in renewable.items()]
                for shard in continued.primaries:
                    # A replaced database has other stamps.
                    if shard not in renewable and (now := stamps.get(ids.get(shard, shard))) is not None:
                        altered, again = _compare_stamps(continued, shard, now)
                        found += [
                            CopyToRenew(name, ids.get(node.id, node.id), f"publication {altered} {ALTERED}")
                            for node in in_chain.nodes
                            if altered and node.shard == shard and node.id not in renewable
                        ]
                        if again and not altered:
                            found.append(CopyToRenew(name, ids.get(shard, shard), PUT_BACK, again))
                renamed += [
                    RenamedNode(name, node.id, node.listed_as) for node in in_chain.fleet.nodes if node.listed_as
                ]
    return tuple(found), tuple(renamed)


def _read_stamps(
    node: Node, connection: psycopg.Connection[Any], fleet_id: str, tables: list[Table]
) -> dict[int, tuple[str, TableStamps]]:
    """Return the publication and the stamps of every table of a primary, by oid."""
    groups = [table.group for table in tables]
    published = check_published(connection, node.id, fleet_id, groups, accepts_altered=True)
    found = ((table, published.get(table.group.name, NOWHERE)) for table in tables)
    return {
        table.oid: (publication_of(table.group, fleet_id), TableStamps(table.oid, one.publication, one.membership))
        for table, one in found
    }


def _compare_stamps(
    continued: Chain, shard: str, now: Mapping[int, tuple[str, TableStamps]]
) -> tuple[str, tuple[str, ...]]:
    """Return a publication that was altered or replaced after the chain's last commit ("" if none was), and the tables.

    These are those of the chain that were taken out of their publication and put back.
    """
    states, altered, again = continued.tables(shard), set[str](), list[str]()
    for group in continued.groups(shard):
        if (was := states.get(group.name)) is None or not was.membership or was.oid not in now:
            continue
        name, stamps = now[was.oid]
        # A table that gets or loses its replica identity changes its publication.
        if not stamps.membership or name != publication_of(group, continued.full.fleet_id):
            continue
        if stamps.publication != was.publication:
            altered.add(name)
        elif stamps.membership != was.membership:
            again.append(group.name)
    return min(altered, default=""), tuple(sorted(again))


def _find_fleet_id(store: ObjectStore, fleet: Fleet) -> str | None:
    """Return the id that the publications' names contain, or None before the first init. The store is checked later."""
    try:
        return read_identity(store, fleet).fleet_id
    except SnapshotError:
        return None


def check_fleet(sessions: Sessions, fleet_id: str | None, rules: GroupRules, progress: Progress) -> list[NodeProblem]:
    """Check settings and privileges for every command; return the problems that affect only some commands.

    Standbys that receive no WAL are left out, which is noted, unless fleet.toml requires them. Raises NodeUnfitError
    with all problems if any of them affects every create.
    """
    # Imported here because they import Arrow: unreachable nodes have been reported by now.
    from cutline.snapshots.create.absent_copies import leave_out_unfit
    from cutline.wal.drain.peek import open_reader

    slots_remedy = partial(how_to_free_slots, sessions.fleet.store.open())
    # A setting of a standby that runs is refused: whoever runs init can change it now.
    problems = leave_out_unfit(sessions, find_node_problems(sessions, slots_remedy), progress, only_away=True)
    problems += find_table_problems(sessions, rules, fleet_id)
    problems += find_session_problems(sessions, sessions.nodes, [open_reader])

    large_objects = Purpose.EVERYTHING if sessions.fleet.with_large_objects else Purpose.LARGE_OBJECTS

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        return [
            *find_catalog_problems(node, connection, PUBLIC_CATALOGS),
            *find_large_object_problems(node, connection, large_objects),
            *find_freeze_problems(node, connection, fleet_id),
        ]

    problems += chain.from_iterable(sessions.ask_named_primaries(find).values())
    if any(one.purpose == Purpose.EVERYTHING for one in problems):
        # If the grants are complete, check_admissible reports missing replica identities.
        problems += _find_identity_problems(sessions, rules)
    refuse_unfit(problems, addresses_of(sessions.fleet.nodes))
    return problems


def _find_identity_problems(sessions: Sessions, rules: GroupRules) -> Iterator[NodeProblem]:
    """Yield the tables without a replica identity, as far as our role can see them."""
    for node_id, connection in sessions.primaries.items():
        node = sessions.fleet.node(node_id)
        try:
            tables = read_tables(connection, rules)
        except psycopg.errors.InsufficientPrivilege:
            action = "then repeat: snapshot init   (it needs these grants to find tables without a replica identity)"
            yield NodeProblem(node_id, "its tables can't be checked yet", action)
            continue
        place = read_role(node, connection).place
        for table in tables:
            if not table.is_admissible:
                problem = f"table {table.group.name} has no usable replica identity"
                other = "or list it under groups.exclude or groups.append_only in fleet.toml"
                if table.statement:
                    yield NodeProblem(node_id, problem, f"{table.statement}  -- {other}", place)
                else:
                    yield NodeProblem(node_id, problem, f"{table.remedy}, {other}")


@contextmanager
def _naming_role(fleet: Fleet) -> Iterator[None]:
    """If primaries lack the role in the DSN or reject its password, add the SQL that creates the role to the hint."""
    try:
        yield
    except NodeUnreachableError as error:
        lines, roles = list[str](), set[str]()
        messages = cast("list[str]", error.details.get("messages", [error.message]))
        addresses = addresses_of(fleet.primaries)
        default = next((one.val or b"" for one in Conninfo.get_defaults() if one.keyword == b"user"), b"").decode()
        for node in fleet.primaries:
            role = str(conninfo_to_dict(node.dsn).get("user") or default)
            signs = (f'role "{role}" does not exist', f'authentication failed for user "{role}"')
            if not any(f"node {node.id}: " in part and sign in part for part in messages for sign in signs):
                continue
            roles.add(role)
            name = quote(role)
            # A pooler may have the database under another name than the server, which can't be asked.
            grant = f"'GRANT CONNECT ON DATABASE %I TO %I', current_database(), {Literal(role).as_string()}"
            lines += [
                connect_line(addresses[node.id], database_name(node.dsn)),
                f"CREATE ROLE {name} LOGIN REPLICATION;",
                rf"SELECT format({grant}) \gexec",
                f"GRANT pg_read_all_stats TO {name};",
            ]
        if lines:
            passwords = ", ".join(f"\\password {quote(role)}" for role in sorted(roles))
            error.hint += "\n" + "\n".join(
                [
                    "-- if the role does not exist, run this in psql as a superuser; the next init, run as this role,",
                    "-- will list everything else that it lacks",
                    *lines,
                    f"-- set the password from your password file: {passwords}",
                ]
            )
        raise


def _update_publications(
    node: Node, connection: psycopg.Connection[Any], fleet_id: str, tables: list[Table]
) -> list[str]:
    names = [qualify(table.group) for table in tables]
    try:
        with raising_locked(node, "publishing tables", names, modes=PUBLISHING), connection.transaction():
            bound_lock_waits(connection)
            return ensure_publications(connection, fleet_id, tables)
    except DDL_RACE_ERRORS as error:
        raise SchemaChangedError(
            f"node {node.id}: tables can't be published: {' '.join(str(error).split())}",
            hint="repeat the command: concurrent DDL changed the tables, or locked them in a different order (deadlock)"
            if isinstance(error, DROPPED_ERRORS)
            else "read the server's message; repeat the command if DDL ran at the same time",
            details={"node": node.id},
        ) from error


def _forget_nodes(sessions: Sessions, store: ObjectStore) -> list[str]:
    with lock_fleet(sessions, sessions.fleet.name, own_label("init")) as lock:
        return forget_nodes(store, {node: sessions.identities[node] for node in lock.granted})


def _append_only_names(tables: list[Table]) -> list[str]:
    return [table.group.name for table in tables if table.group.identity == "append_only"]

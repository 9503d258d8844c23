"""Sessions on all nodes in a fleet."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import psycopg
from msgspec import Struct, field, structs

from cutline.fleet.chain_ids import with_chain_ids
from cutline.fleet.config import Fleet, KnownServer, Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NODES_NAMED_MAX, join_some, list_some, without_node
from cutline.fleet.timeline_history import TimelineHistory
from cutline.nodes.baseline import (
    FoundNode,
    NodeIdentity,
    can_decode,
    check_baseline,
    check_topology,
    find_node,
    two_hosts_error,
    two_primaries_error,
)
from cutline.nodes.clocks import ClockReading, use_clocks
from cutline.nodes.connections import (
    NodeUnreachableError,
    connect,
    has_answered,
    host_of,
    on_each_host,
    raising_unreachable,
    refuses_database,
    unreachable_error,
)
from cutline.nodes.daemon_threads import THREADS_MAX, await_futures, start_daemons
from cutline.nodes.open_sessions import cancel_statements
from cutline.nodes.problems import (
    RUN_INIT,
    NodeProblem,
    find_connect_problems,
    find_decoding_problems,
    raising_unfit,
    read_role,
    refuse_unfit,
)
from cutline.nodes.roles import ServerState, find_promoted, with_exchanged
from cutline.nodes.timelines import read_switches
from cutline.nodes.watch import Watch, watch_nodes
from cutline.storage.errors import SnapshotError, UnreachableError

Item = TypeVar("Item")
Result = TypeVar("Result")
CANCEL_AGAIN_SECONDS = 0.5
# How long each other host of a primary's dsn is waited for, in every command.
HOST_SECONDS_MAX = "2"
WITHOUT_STANDBYS = "; to take a full snapshot without standbys: snapshot create NAME --only-primary"


class Absence(Struct, frozen=True):
    """Why a command does without a standby, and what to do there, if that is known.

    If it `has_ended`, the standby's copy in the chain can't be continued.
    """

    reason: str
    has_ended: bool = False
    remedy: str = ""


class Sessions(Struct, frozen=True):
    """One open session per node, and the nodes' identities. `renew` replaces a lost session.

    `chosen` are the nodes that the command wanted to use. `absent` are the standbys that it does without, by node, and
    `too_old` are standbys that can't decode their WAL: neither have a session here, and they are not copied. Of the
    standbys that are `incomplete`, whose tables are copied in the background, only the WAL is archived. `clocks` are
    the primaries' clocks, read when the sessions started. `promoted` names, by primary, the standbys of fleet.toml
    whose servers have taken the primaries' places. `switches` are those of the primaries' timelines, by node, once they
    have been read (`read_histories`).
    """

    fleet: Fleet
    chosen: tuple[Node, ...]
    connections: dict[str, psycopg.Connection[Any]]
    identities: dict[str, NodeIdentity]
    watch: Watch
    too_old: tuple[Node, ...] = ()
    clocks: tuple[ClockReading, ...] = ()
    absent: dict[str, Absence] = field(default_factory=dict)
    promoted: Mapping[str, str] = field(default_factory=dict)
    incomplete: set[str] = field(default_factory=set)
    switches: dict[str, dict[int, Lsn]] = field(default_factory=dict)

    def with_chain_ids(self, renamed: Mapping[str, str]) -> Sessions:
        """Return the nodes with the ids of a chain (fleet.chain_ids), for questions that the identities answer.

        The connections and the watch have the ids of fleet.toml.
        """
        fleet = with_chain_ids(self.fleet, renamed)
        ids = {node.listed_id: node.id for node in fleet.nodes}
        return structs.replace(
            self,
            fleet=fleet,
            chosen=tuple(fleet.node(ids.get(node.id, node.id)) for node in self.chosen),
            identities={ids.get(node, node): identity for node, identity in self.identities.items()},
            absent={ids.get(node, node): absence for node, absence in self.absent.items()},
        )

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that the command uses."""
        return tuple(node for node in self.chosen if node.id not in self.absent)

    @property
    def copied_nodes(self) -> tuple[Node, ...]:
        """The nodes on which tables are copied."""
        return tuple(node for node in self.nodes if node.id not in self.incomplete)

    def may_leave_out(self, node: Node) -> bool:
        """Whether the command may do without the node: a standby, unless fleet.toml requires that many."""
        others = sum(other.backup_of == node.backup_of for other in self.copied_nodes if other.id != node.id)
        return node.backup_of is not None and others >= self.fleet.standbys_needed(node.shard)

    def leave_out(self, node: Node, absence: Absence) -> None:
        """Do without the standby from now on."""
        self.absent[node.id] = absence
        self.watch.leave_out(node.id)
        self.identities.pop(node.id, None)
        if (connection := self.connections.pop(node.id, None)) is not None:
            connection.close()

    @property
    def primaries(self) -> dict[str, psycopg.Connection[Any]]:
        """The primaries' sessions."""
        return {node.id: self.connections[node.id] for node in self.nodes if node.backup_of is None}

    @property
    def by_node(self) -> dict[Node, psycopg.Connection[Any]]:
        """The sessions by node."""
        return {node: self.connections[node.id] for node in self.nodes}

    def ask_primaries(self, read: Callable[[psycopg.Connection[Any]], Result]) -> dict[str, Result]:
        """Call `read` with every primary's session, in parallel; return its results by node.

        Raises NodeUnreachableError naming the node whose session was lost.
        """
        return self.ask_named_primaries(lambda _, connection: read(connection))

    def ask_named_primaries(self, read: Callable[[Node, psycopg.Connection[Any]], Result]) -> dict[str, Result]:
        """Call ask_primaries with a `read` that takes the node as well."""
        return self._ask([node for node in self.nodes if node.backup_of is None], read)

    def ask_nodes(self, read: Callable[[Node, psycopg.Connection[Any]], Result]) -> dict[str, Result]:
        """Call ask_named_primaries for all nodes, standbys included."""
        return self._ask(self.nodes, read)

    def _ask(self, nodes: Sequence[Node], read: Callable[[Node, psycopg.Connection[Any]], Result]) -> dict[str, Result]:
        def ask(node: Node) -> Result:
            with raising_unreachable(node):
                return read(node, self.connections[node.id])

        return dict(zip((node.id for node in nodes), in_parallel(ask, nodes), strict=True))

    def read_histories(self) -> None:
        """Read the histories of the primaries' timelines; raise NodeUnreachableError and NodeUnfitError."""
        primaries = [node for node in self.nodes if node.backup_of is None]

        def read(node: Node) -> dict[int, Lsn]:
            try:
                return read_switches(node, self.identities[node.id].timeline)
            except NodeUnreachableError as error:
                if has_answered(error.__cause__):
                    # A role without REPLICATION is refused before its session starts.
                    with raising_unreachable(node):
                        role = read_role(node, self.connections[node.id])
                    refuse_unfit(find_decoding_problems(node, role))
                raise

        self.switches.update(zip((node.id for node in primaries), in_parallel(read, primaries), strict=True))

    def history(self, node: Node) -> TimelineHistory:
        """Return the history of the node's timeline, which a standby shares with its primary, as far as it is known."""
        timeline, switches = self.identities[node.id].timeline, self.switches.get(node.shard, {})
        if timeline != self.identities[node.shard].timeline and timeline not in switches:
            return TimelineHistory(timeline)
        return TimelineHistory(timeline, {one: end for one, end in switches.items() if one < timeline})

    def renew(self, node: Node) -> psycopg.Connection[Any]:
        """Replace the session on `node` with a new session, and check that the node is still the same.

        Raises NodeUnreachableError, BaselineChangedError, and ServerPromotedError.
        """
        self.connections[node.id].close()
        # The baseline identifies the server, so `connect` does not have to.
        connection = connect(replace(node, server=None))
        try:
            was, now = self.identities[node.id], identify(node, connection).identity
            if now.timeline != was.timeline:
                raise promoted_error(node, f"its timeline was {was.timeline} and is {now.timeline}")
            # Another server of the shard may have begun a timeline with the same number.
            if node.id in self.switches and self.switches[node.id] != read_switches(node, now.timeline):
                raise promoted_error(node, f"its timeline {now.timeline} has another history than before")
            check_baseline({node.id: was}, {node.id: now})
        except BaseException:
            connection.close()
            raise
        self.connections[node.id] = connection
        return connection


def in_parallel(
    work: Callable[[Item], Result], items: Iterable[Item], interrupted: Callable[[], object] | None = None
) -> list[Result]:
    """Call `work` on all items, up to THREADS_MAX at a time; wait for all calls, then raise the first error.

    If this thread is interrupted while it waits, call `interrupted`, which should end the calls in progress.
    Without `interrupted`, the calls' statements are cancelled.
    """
    ordered = list(items)
    if not ordered:
        return []
    with ThreadPoolExecutor(max_workers=min(len(ordered), THREADS_MAX)) as threads:
        futures = [threads.submit(work, item) for item in ordered]
        try:
            # Don't stop waiting at the first error: an interrupt would then arrive while the executor waits for the
            # other calls.
            wait(futures)
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            if interrupted:
                interrupted()
                raise
            while left := [future for future in futures if not future.done()]:
                cancel_statements()
                wait(left, timeout=CANCEL_AGAIN_SECONDS)
            raise
    return [future.result() for future in futures]


def let_end() -> None:
    """Do nothing: passed to `in_parallel` as `interrupted`, it lets the calls in progress finish."""


class ServerPromotedError(UnreachableError):
    """A server has changed its timeline while a command was using it; the next command uses it as it is now."""


def promoted_error(node: Node, why: str) -> ServerPromotedError:
    """Return the error that says how the server of the node has changed."""
    return ServerPromotedError(
        f"node {node.id}: its server was promoted: {why}",
        hint="repeat the command: it continues on the promoted server if that has all WAL of the chain",
        details={"node": node.id},
    )


class _RolesChangedError(Exception):
    """Standbys of fleet.toml have taken their primaries' places: `promoted` names them by primary."""

    def __init__(self, promoted: Mapping[str, str]) -> None:
        super().__init__("the roles of servers have changed")
        self.promoted = promoted


@contextmanager
def open_sessions(
    fleet: Fleet,
    nodes: Iterable[Node],
    *,
    unfit_hint: str = RUN_INIT,
    needs_all: bool = False,
    spares_standbys: bool = False,
    away: dict[str, str] | None = None,
    known: Callable[[], Mapping[str, str]] = dict,
) -> Iterator[Sessions]:
    """Connect to `nodes` in parallel, check their roles against fleet.toml, and watch whether they answer.

    With `needs_all`, errors do not suggest a snapshot without the standbys that can't be reached. From then on, this
    process uses the time of the primaries' clocks (nodes/clocks.py). With `spares_standbys`, standbys that can't be
    reached at first are left out, unless fleet.toml requires them (Sessions.absent). If `away` is given, nodes that
    can't be reached at first are left out, unless no primary is left, and `away` gets the reason by node; standbys
    whose primary can't be reached are left out as well.

    If a standby of fleet.toml has been promoted, and its primary can't be reached or has become a standby, the two
    servers are exchanged in the fleet of the sessions: a node is a role in its shard, and fleet.toml lists the servers.
    `known` returns the system identifiers of primaries, as far as they are known: no other server takes their place. It
    is called only if primaries are lost.

    Raises FleetTopologyError, also if two hosts of a primary's dsn accept writes. Raises NodeUnfitError if our role
    lacks a privilege, and NodeUnreachableError if a node can't be reached, stops answering or ends a session; these two
    may also be raised while the block runs.
    """
    chosen = tuple(nodes)
    options = _Options(unfit_hint, needs_all, spares_standbys, known)
    with ExitStack() as stack:
        try:
            sessions = stack.enter_context(_open_as_listed(fleet, chosen, options, away))
        except _RolesChangedError as changed:
            fleet = with_exchanged(fleet, changed.promoted)
            chosen = tuple(fleet.node(node.id) for node in chosen)
            sessions = stack.enter_context(_open_as_listed(fleet, chosen, options, away))
            sessions = structs.replace(sessions, promoted=changed.promoted)
        yield sessions


class _Options(Struct, frozen=True):
    """The options of open_sessions."""

    unfit_hint: str
    needs_all: bool
    spares_standbys: bool
    known: Callable[[], Mapping[str, str]]


@contextmanager
def _open_as_listed(
    fleet: Fleet, chosen: tuple[Node, ...], options: _Options, away: dict[str, str] | None
) -> Iterator[Sessions]:
    """Open the sessions; raise _RolesChangedError if a standby has taken its primary's place."""
    needs_all = options.needs_all
    with ExitStack() as stack:
        stack.enter_context(raising_unfit(hint=options.unfit_hint))
        watch = stack.enter_context(watch_nodes(chosen))
        refused: dict[str, list[NodeProblem]] = {}
        futures = _connect_all(chosen, refused)
        connections: dict[str, psycopg.Connection[Any]] = {}
        stack.callback(_close, connections)
        problems: dict[str, Exception] = {}
        for node, future in zip(chosen, futures, strict=True):
            try:
                connections[node.id] = future.result()
            except Exception as error:  # noqa: BLE001  # raised below, after all nodes have been tried
                problems[node.id] = error
        refuse_unfit([problem for node in chosen for problem in refused.get(node.id, ())])
        found_nodes = _identify_all(chosen, connections, problems)
        lost = _lost_primaries(chosen, problems, found_nodes)
        if promoted := _ask_promoted(fleet, lost, options.known() if lost else {}):
            raise _RolesChangedError(promoted)
        absent: dict[str, Absence] = {}
        if away is None:
            spared = _spared(fleet, chosen, problems) if options.spares_standbys else ()
            _raise_problems(
                chosen, {name: found for name, found in problems.items() if name not in spared}, needs_all=needs_all
            )
            for name in spared:
                watch.leave_out(name)
                if name in connections:
                    connections.pop(name).close()
                absent[name] = Absence(_reason(problems[name], name))
            for find in (_misdirected, _with_other_database) if options.spares_standbys else ():
                for node, reason in find(fleet, chosen, found_nodes).items():
                    watch.leave_out(node.id)
                    found_nodes.pop(node.id)
                    connections.pop(node.id).close()
                    absent[node.id] = Absence(reason)
        else:
            left = _without_away(chosen, problems, away)
            for node in set(chosen) - set(left):
                watch.leave_out(node.id)
                found_nodes.pop(node.id, None)
                if node.id in connections:
                    connections.pop(node.id).close()
            chosen = left
        check_topology([node for node in chosen if node.id not in absent], found_nodes)
        _check_hosts(chosen, found_nodes)
        identities = {name: found_node.identity for name, found_node in found_nodes.items()}
        clocks = tuple(found_nodes[node.id].clock for node in chosen if node.backup_of is None)
        use_clocks(clocks)
        too_old = tuple(node for node in chosen if node.id in identities and not can_decode(identities[node.id]))
        for node in too_old:
            connections.pop(node.id).close()
            del identities[node.id]
        known = {
            name: KnownServer(identity.system_identifier, identity.in_recovery) for name, identity in identities.items()
        }
        nodes_found = [replace(node, server=known.get(node.id)) for node in fleet.nodes]
        fleet = replace(fleet, nodes=tuple(nodes_found))
        chosen = tuple(replace(node, server=known.get(node.id)) for node in chosen if node not in too_old)
        with _naming_lost(chosen, connections, needs_all=needs_all):
            yield Sessions(fleet, chosen, connections, identities, watch, too_old, clocks, absent)


def _lost_primaries(
    chosen: Sequence[Node], problems: Mapping[str, Exception], found: Mapping[str, FoundNode]
) -> dict[Node, NodeIdentity | None]:
    """Return the primaries that can't be reached, and those that are standbys now, with their identities."""
    lost: dict[Node, NodeIdentity | None] = {}
    for node in (node for node in chosen if node.backup_of is None):
        if isinstance(problems.get(node.id), NodeUnreachableError):
            lost[node] = None
        elif node.id in found and found[node.id].identity.in_recovery:
            lost[node] = found[node.id].identity
    return lost


def with_current_roles(fleet: Fleet) -> Fleet:
    """Return the fleet with promoted standbys in their primaries' places, as open_sessions exchanges them.

    Raises the errors of ask_current_roles.
    """
    return with_exchanged(fleet, ask_current_roles(fleet))


def ask_current_roles(fleet: Fleet) -> dict[str, str]:
    """Ask all servers, and return the standbys that have been promoted, by primary.

    Raises FleetTopologyError if a primary and one of its standbys both accept writes, or two hosts of a primary's dsn;
    and NodeUnreachableError if a primary has become a standby, and the server that could be the primary now can't be
    reached.
    """
    found = dict(zip(fleet.primaries, in_parallel(_find, fleet.primaries), strict=True))
    answers = {primary: one.identity if one else None for primary, one in found.items()}
    lost = {primary: known for primary, known in answers.items() if known is None or known.in_recovery}
    writing = {primary.id: one for primary, one in found.items() if one is not None and primary not in lost}
    # The dsn may admit only a standby, which a promoted server is no longer.
    standbys = [one for node in fleet.nodes if node.backup_of in writing for one in on_each_host(node)]
    for node, one in zip(standbys, in_parallel(_find, standbys), strict=True):
        # The dsn of a standby may lead to its primary.
        if one is not None and not one.identity.in_recovery and not one.is_server_of(writing[node.shard]):
            raise two_primaries_error(node)
    _check_hosts(fleet.primaries, writing)
    return _ask_promoted(fleet, lost, {})


def _check_hosts(nodes: Iterable[Node], found: Mapping[str, FoundNode]) -> None:
    """Raise FleetTopologyError if another host of a primary's dsn accepts writes, too, besides the server `found`.

    Hosts that don't answer within HOST_SECONDS_MAX, or refuse the role, count as stopped.
    """
    primaries = [node for node in nodes if node.backup_of is None and node.id in found]
    hosts = [(node, host) for node in primaries if len(named := on_each_host(node)) > 1 for host in named]
    answers = zip(hosts, in_parallel(lambda one: _find_host(one[1]), hosts), strict=True)
    servers = {(node.id, host_of(host)): answer for (node, host), answer in answers if answer}
    for node in primaries:
        # Several hosts may be names of the same server.
        of_node = {host: answer for (primary, host), answer in servers.items() if primary == node.id}
        ours = [host for host, answer in of_node.items() if answer.is_server_of(found[node.id])]
        others = [host for host, answer in of_node.items() if not answer.identity.in_recovery and host not in ours]
        if others:
            raise two_hosts_error(node, [*ours[:1], *others])


def _find_host(host: Node) -> FoundNode | None:
    try:
        with connect(replace(host, server=None), connect_timeout=HOST_SECONDS_MAX) as connection:
            return identify(host, connection)
    except (SnapshotError, psycopg.Error):
        return None


def _ask_promoted(
    fleet: Fleet, lost: Mapping[Node, NodeIdentity | None], identifiers: Mapping[str, str]
) -> dict[str, str]:
    """Return the standbys that have been promoted, by primary; `lost` are primaries that are away (None) or standbys.

    `identifiers` are as in find_promoted. Raises NodeUnreachableError if a primary has become a standby, and the server
    that could be the primary now can't be reached.
    """
    standbys = [node for node in fleet.nodes if node.backup_of in {primary.id for primary in lost}]
    answers = {primary.id: known for primary, known in lost.items()}
    answers |= {node.id: known for node, known in zip(standbys, in_parallel(_identity_of, standbys), strict=True)}
    servers = {
        node: ServerState(known.in_recovery, known.system_identifier) if known else None
        for node, known in answers.items()
    }
    promoted = find_promoted(fleet, servers, identifiers)
    for primary, known in lost.items():
        own = [node.id for node in standbys if node.backup_of == primary.id]
        away = [node for node in own if servers[node] is None]
        accepts_writes = any(state is not None and not state.is_in_recovery for state in map(servers.get, own))
        if known is not None and not accepts_writes and away:
            raise NodeUnreachableError(
                f"node {primary.id}: no server of its shard accepts writes: it is a standby, and"
                f" {list_some(away, NODES_NAMED_MAX)} can't be reached",
                hint="start the primary, or promote a standby: the next increment continues the chain",
                details={"node": primary.id, "nodes": away},
            )
    return promoted


def _find(node: Node) -> FoundNode | None:
    try:
        with connect(replace(node, server=None)) as connection:
            return identify(node, connection)
    except NodeUnreachableError:
        return None


def _identity_of(node: Node) -> NodeIdentity | None:
    found = _find(node)
    return None if found is None else found.identity


def ask_nodes(nodes: Sequence[Node]) -> dict[str, FoundNode]:
    """Return the answers of the nodes that can be reached, without opening sessions for a command."""
    answers = in_parallel(_find, nodes)
    return {node.id: found for node, found in zip(nodes, answers, strict=True) if found is not None}


def ask_identities(nodes: Sequence[Node]) -> dict[str, NodeIdentity]:
    """Return the identities of the nodes that can be reached, without opening sessions for a command."""
    return {node: found.identity for node, found in ask_nodes(nodes).items()}


def _identify_all(
    nodes: Sequence[Node], connections: Mapping[str, psycopg.Connection[Any]], problems: dict[str, Exception]
) -> dict[str, FoundNode]:
    """Read the identities of the nodes that have no problem; add a problem for each session that is lost."""

    def read(node: Node) -> FoundNode | NodeUnreachableError:
        try:
            return identify(node, connections[node.id])
        except NodeUnreachableError as error:
            return error

    reached = [node for node in nodes if node.id not in problems]
    found: dict[str, FoundNode] = {}
    for node, answer in zip(reached, in_parallel(read, reached), strict=True):
        if isinstance(answer, NodeUnreachableError):
            problems[node.id] = answer
        else:
            found[node.id] = answer
    return found


@contextmanager
def _naming_lost(
    nodes: Sequence[Node], connections: Mapping[str, psycopg.Connection[Any]], *, needs_all: bool
) -> Iterator[None]:
    """If a session is lost during the block, raise NodeUnreachableError, which names its node."""
    try:
        yield
    except psycopg.OperationalError as error:
        lost = [node for node in nodes if node.id in connections and connections[node.id].closed]
        if not lost:
            raise
        found = unreachable_error(lost[0], error)
        raise (found if needs_all else _suggesting_less(found, nodes)) from error
    except NodeUnreachableError as error:
        if not needs_all:
            _suggesting_less(error, nodes)
        raise


def _suggesting_less(error: NodeUnreachableError, nodes: Sequence[Node]) -> NodeUnreachableError:
    """Make the error of a standby that a create has lost suggest a snapshot without standbys; return the error."""
    standbys = {node.id for node in nodes if node.backup_of is not None}
    # Other errors, such as that of a disk that is full, have remedies of their own.
    if type(error) is NodeUnreachableError and error.details.get("node") in standbys:
        error.hint = f"{error.hint.removesuffix(WITHOUT_STANDBYS)}{WITHOUT_STANDBYS}"
    return error


def _spared(fleet: Fleet, nodes: Sequence[Node], problems: Mapping[str, Exception]) -> tuple[str, ...]:
    """Return the standbys among the nodes with problems that can't be reached, and that fleet.toml does not require."""
    lost = {name for name, problem in problems.items() if isinstance(problem, NodeUnreachableError)}
    left = Counter(node.backup_of for node in nodes if node.id not in problems)
    return tuple(
        node.id
        for node in nodes
        if node.id in lost and node.backup_of is not None and left[node.backup_of] >= fleet.standbys_needed(node.shard)
    )


def _misdirected(fleet: Fleet, nodes: Sequence[Node], found: Mapping[str, FoundNode]) -> dict[Node, str]:
    """Return the standbys whose dsn leads to their primary's server, as after a failover, if they are not required.

    The dsn of the primary lists several hosts then, or an address that follows the primary. The values say so.
    """
    misdirected: dict[Node, str] = {}
    for node in nodes:
        primary, own = found.get(node.shard), found.get(node.id)
        if node.backup_of is None or primary is None or own is None or fleet.standbys_needed(node.shard):
            continue
        if own.is_server_of(primary):
            misdirected[node] = f"its dsn leads to the server of {node.backup_of}"
    return misdirected


def _with_other_database(fleet: Fleet, nodes: Sequence[Node], found: Mapping[str, FoundNode]) -> dict[Node, str]:
    """Return the standbys whose database of the primary's name is another one, with the reason, if not required.

    The primary's database was dropped and created again, or renamed, and the standby has not replayed that yet.
    """
    left = Counter(node.backup_of for node in nodes if node.id in found)
    late: dict[Node, str] = {}
    for node in nodes:
        primary, own = found.get(node.shard), found.get(node.id)
        if node.backup_of is None or primary is None or own is None or not own.identity.in_recovery:
            continue
        of_primary, identity = primary.identity, own.identity
        is_same_server = identity.system_identifier == of_primary.system_identifier
        if not is_same_server or identity.database != of_primary.database or identity.place == of_primary.place:
            continue
        if left[node.backup_of] > fleet.standbys_needed(node.shard):
            left[node.backup_of] -= 1
            late[node] = (
                f"its database {identity.database} is the one before {node.backup_of}'s was created again or renamed:"
                " it has not replayed that yet"
            )
    return late


def _reason(problem: Exception, node: str) -> str:
    message = problem.message if isinstance(problem, SnapshotError) else str(problem)
    return without_node(message, node)


def _without_away(nodes: Sequence[Node], problems: Mapping[str, Exception], away: dict[str, str]) -> tuple[Node, ...]:
    """Note the nodes that can't be reached in `away`; return the others, without standbys of such primaries.

    Raises any other problem, and NodeUnreachableError if no primary can be reached.
    """
    lost = {name: problem for name, problem in problems.items() if isinstance(problem, NodeUnreachableError)}
    if len(lost) < len(problems) or all(node.id in lost for node in nodes if node.backup_of is None):
        _raise_problems(nodes, problems, needs_all=True)
    away |= {name: without_node(problem.message, name) for name, problem in lost.items()}
    return tuple(node for node in nodes if node.id not in lost and node.shard not in lost)


def _raise_problems(nodes: Sequence[Node], problems: Mapping[str, Exception], *, needs_all: bool) -> None:
    """Raise the first problem or, if it is an unreachable node, an error that names all unreachable nodes."""
    if not problems:
        return
    found = list(problems.values())
    errors = [problem for problem in found if isinstance(problem, NodeUnreachableError)]
    if not isinstance(found[0], NodeUnreachableError):
        raise found[0]
    away = [str(error.details["node"]) for error in errors]
    is_avoidable = not needs_all and all(node.backup_of for node in nodes if node.id in away)
    hints = dict.fromkeys(f"{error.hint}{WITHOUT_STANDBYS if is_avoidable else ''}" for error in errors)
    raise NodeUnreachableError(
        join_some((error.message for error in errors), NODES_NAMED_MAX),
        hint="\n".join(hints).split("\n"),
        details={"node": away[0], "nodes": away, "messages": [error.message for error in errors]},
    ) from errors[0].__cause__


def _connect_all(nodes: Sequence[Node], refused: dict[str, list[NodeProblem]]) -> list[Future[psycopg.Connection[Any]]]:
    """Call _connect for each node, up to THREADS_MAX at a time, and wait for all calls.

    An interrupt ends the wait, because a node that doesn't answer would delay the end of the command. Sessions that
    connect later are closed at once.
    """
    futures = [Future[psycopg.Connection[Any]]() for _ in nodes]
    left = deque(zip(nodes, futures, strict=True))

    def connect_one(one: tuple[Node, Future[psycopg.Connection[Any]]]) -> None:
        node, future = one
        try:
            future.set_result(_connect(node, refused))
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            future.set_exception(error)

    try:
        await_futures(futures, start_daemons(connect_one, left, "connect"))
    except KeyboardInterrupt:
        left.clear()
        for future in futures:
            future.add_done_callback(_close_connected)
        raise
    return futures


def _close_connected(future: Future[psycopg.Connection[Any]]) -> None:
    if future.exception() is None:
        future.result().close()


def _connect(node: Node, refused: dict[str, list[NodeProblem]]) -> psycopg.Connection[Any]:
    """Connect to `node`, or raise NodeUnreachableError; if a missing privilege is the cause, add it to `refused`."""
    try:
        return connect(node)
    except NodeUnreachableError as error:
        if refuses_database(node, error.__cause__):
            refused[node.id] = list(find_connect_problems(node))
        raise


def _close(connections: Mapping[str, psycopg.Connection[Any]]) -> None:
    for connection in connections.values():
        connection.close()


def identify(node: Node, connection: psycopg.Connection[Any]) -> FoundNode:
    """Read the identity of `node`; raise NodeUnreachableError if the session is lost."""
    with raising_unreachable(node):
        return find_node(node, connection)

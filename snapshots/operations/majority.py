"""The primaries of the largest fleet that a store has served, and the majority of them that an operation must lock.

Two commands that each see only a part of the fleet can't both hold more than half of it. Records are numbered, and each
is created only once, so if two commands start with an empty store, the second command is checked against the record of
the first. Each record has more primaries than the previous record, or replaces the servers of a few of its primaries,
unless an operator requested the record (forget_nodes). The newest record counts.

A record also has the primaries' timelines, so that no create takes the server before a failover for the primary
(snapshots/operations/old_primaries.py). Only creates that have checked this record an earlier timeline than before.

Commands exclude each other only if they lock at least one server in common. So a fleet whose nodes have the recorded
ids but are different servers is refused, and a recorded server counts even if fleet.toml has another id for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from msgspec import UNSET, Struct, UnsetType, field

from cutline.nodes.baseline import NodeIdentity
from cutline.snapshots.records.documents import read_sealed, seal
from cutline.snapshots.records.proven_chains import read_full, snapshot_names
from cutline.snapshots.records.store_identity import BaselineRecord, RecordedPrimary, baseline_key
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError
from cutline.storage.ids import new_operation_id
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

FILE = re.compile(r"(\d{16})\.json")


class MajorityMissingError(RefusedError):
    """No more than half of the recorded primaries are locked."""


class OtherServersError(RefusedError):
    """Too many nodes are not the servers that are recorded under their ids."""


class RecordedPrimaries(Struct, frozen=True):
    """The node ids of the recorded primaries, and their system identifiers; `number` is 0 if no record is stored.

    `timelines` are those of the servers, as far as they are known.
    """

    number: int
    primaries: tuple[str, ...]
    identifiers: Mapping[str, str] = field(default_factory=dict)
    timelines: Mapping[str, int] = field(default_factory=dict)

    def recognise(self, nodes: Mapping[str, NodeIdentity]) -> dict[str, str]:
        """Return the recorded ids of the nodes, by their ids now.

        A node is the recorded primary with its system identifier, unless others have it too; otherwise the one with its
        id. Nodes that are none are missing.
        """
        counts = Counter(self.identifiers.values()), Counter(one.system_identifier for one in nodes.values())
        by_server = {known: node for node, known in self.identifiers.items()}
        found = {
            node: by_server[one.system_identifier]
            for node, one in nodes.items()
            if all(count[one.system_identifier] == 1 for count in counts)
        }
        taken = {*found.values()}
        return found | {node: node for node in nodes if node in self.primaries and not {node} & {*found, *taken}}

    def known_timelines(self, nodes: Mapping[str, NodeIdentity]) -> dict[str, int]:
        """Return the recorded timelines of the nodes' servers, by the nodes' ids now, as far as they are known."""
        return {
            node: self.timelines[known]
            for node, known in self.recognise(nodes).items()
            if known in self.timelines and self.identifiers[known] == nodes[node].system_identifier
        }

    def entry(self, known: str, node: str) -> RecordedPrimary:
        """Return the entry of the primary `known` for the next record, under the id `node`."""
        return RecordedPrimary(node, self.identifiers[known], self.timelines.get(known, UNSET))

    def others(self, nodes: Mapping[str, NodeIdentity]) -> list[str]:
        """Return the nodes that are recorded with a different system identifier, in the order of the record."""
        return sorted(
            (
                node
                for node, known in self.recognise(nodes).items()
                if self.identifiers.get(known) not in (None, nodes[node].system_identifier)
            ),
            key=self.primaries.index,
        )


def read_recorded_primaries(store: ObjectStore) -> RecordedPrimaries:
    """Read the newest record; if none is stored, the primaries of the largest fleet among the committed snapshots."""
    if (recorded := read_newest_record(store)) is not None:
        return recorded
    primaries = [read_full(store, name).primaries for name in snapshot_names(store)]
    return RecordedPrimaries(0, max(primaries, key=len, default=()))


def read_recorded_servers(store: ObjectStore) -> Mapping[str, str]:
    """Read the system identifiers of the primaries in the newest record, by node; empty if there is no record."""
    recorded = read_newest_record(store)
    return recorded.identifiers if recorded else {}


def read_records(store: ObjectStore) -> dict[int, BaselineRecord]:
    """Read all records that a listing shows, keyed by number, in order; raise ManifestError."""
    names = (FILE.fullmatch(name) for name in store.list_children("baselines"))
    records: dict[int, BaselineRecord] = {}
    for number in sorted(int(match[1]) for match in names if match):
        with suppress(ObjectMissingError):
            records[number] = read_sealed(store, baseline_key(number), BaselineRecord)
    return records


def read_newest_record(store: ObjectStore) -> RecordedPrimaries | None:
    """Read the newest record; None if none is stored."""
    names = (FILE.fullmatch(name) for name in store.list_children("baselines"))
    number = max((int(match[1]) for match in names if match), default=0)
    # A listing may be out of date.
    while store.exists(baseline_key(number + 1)):
        number += 1
    if not number:
        return None
    record: BaselineRecord = read_sealed(store, baseline_key(number), BaselineRecord)
    identifiers = {entry.node: entry.system_identifier for entry in record.primaries}
    timelines = {entry.node: entry.timeline for entry in record.primaries if not isinstance(entry.timeline, UnsetType)}
    return RecordedPrimaries(number, tuple(identifiers), identifiers, timelines)


def check_majority(recorded: RecordedPrimaries, granted: Mapping[str, NodeIdentity]) -> None:
    """Raise MajorityMissingError unless more than half of the recorded primaries granted their lock.

    Raises OtherServersError if too many of them are different servers.
    """
    primaries = set(recorded.primaries)
    held, needed = {*recorded.recognise(granted).values()}, len(primaries) // 2 + 1
    if not primaries or len(held) >= needed:
        check_servers(recorded, granted)
        return
    missing = sorted(primaries - held)
    raise MajorityMissingError(
        f"only {len(held)} of the {len(primaries)} recorded primaries granted their lock, but {needed} are needed;"
        f" missing: {', '.join(missing)}",
        hint="list all nodes of the fleet in fleet.toml; if the fleet has shrunk, and nothing else takes snapshots of"
        " the missing nodes: snapshot init --forget-nodes",
        details={"granted": sorted(granted), "baseline": sorted(primaries), "needed": needed, "missing": missing},
    )


def check_servers(recorded: RecordedPrimaries, nodes: Mapping[str, NodeIdentity]) -> None:
    """Raise OtherServersError if so many nodes are different servers that a majority could include none of the rest.

    `nodes` are the nodes whose lock was granted, or all nodes that were asked.
    """
    others = recorded.others(nodes)
    known = len(recorded.recognise(nodes)) - len(others)
    # Another command may hold any majority of the recorded servers; this many nodes include at least one server of
    # every majority.
    needed = len(recorded.primaries) - len(recorded.primaries) // 2
    if not others or known >= needed:
        return
    known_as = recorded.identifiers
    places = [
        f"node {node} is not the recorded server: its system identifier was {known_as[node]}"
        f", but is now {nodes[node].system_identifier}"
        for node in others
    ]
    raise OtherServersError(
        "; ".join(places),
        hint="if this is a different fleet, use a separate store; if these servers have replaced the fleet's servers,"
        " and nothing else takes snapshots of the old servers: snapshot init --forget-nodes",
        details={"nodes": others, "recorded": {node: known_as[node] for node in others}},
    )


def claim_majority(
    store: ObjectStore, granted: Mapping[str, NodeIdentity], check: Callable[[RecordedPrimaries], None] | None = None
) -> None:
    """Check the majority; record the primaries that granted their lock if they outnumber the newest record.

    Also records primaries whose servers were replaced, that have other ids, or whose timelines are later than the
    recorded ones. If there is a `check`, which raises an error if the record shows that a server is an old primary,
    earlier timelines are recorded, too. The caller holds their locks. Raises MajorityMissingError and
    OtherServersError.
    """
    while True:
        recorded = read_recorded_primaries(store)
        check_majority(recorded, granted)
        if check is not None:
            check(recorded)
        entries = _entries_of(recorded, granted, keeps_later=check is None)
        if recorded.number and len(granted) <= len(recorded.primaries):
            found = recorded.recognise(granted)
            left = {node: known for node, known in recorded.identifiers.items() if node not in {*found.values()}}
            is_renamed = any(node != known for node, known in found.items()) and not left.keys() & found.keys()
            has_moved = any(recorded.timelines.get(known) != entries[node].timeline for node, known in found.items())
            if not recorded.others(granted) and not is_renamed and not has_moved:
                return
            names = {known: node for node, known in found.items()} if is_renamed else {node: node for node in found}
            entries = {
                name: entries.get(name, recorded.entry(known, name))
                for known, name in ((known, names.get(known, known)) for known in recorded.primaries)
            }
            if [*entries.values()] == [recorded.entry(known, known) for known in recorded.primaries]:
                return
        if _record(store, recorded.number + 1, entries.values(), forgotten=()):
            return


def _entries_of(
    recorded: RecordedPrimaries, granted: Mapping[str, NodeIdentity], *, keeps_later: bool = True
) -> dict[str, RecordedPrimary]:
    """Return the entries of the primaries for the next record, by node, with later timelines that are recorded."""
    before = recorded.known_timelines(granted) if keeps_later else {}
    return {
        node: RecordedPrimary(node, one.system_identifier, max(one.timeline, before.get(node, 0)))
        for node, one in granted.items()
    }


def forget_nodes(store: ObjectStore, granted: Mapping[str, NodeIdentity]) -> list[str]:
    """Record only these primaries if the newest record contains others; return the node ids whose servers are dropped.

    Only this command makes the record smaller, or replaces all of its servers. The caller holds the locks of `granted`.
    """
    while True:
        recorded = read_recorded_primaries(store)
        found = recorded.recognise(granted)
        forgotten = sorted({*(set(recorded.primaries) - {*found.values()}), *recorded.others(granted)})
        # One of them may be the server before a failover: its timeline is not forgotten.
        if not forgotten or _record(
            store, recorded.number + 1, _entries_of(recorded, granted).values(), tuple(forgotten)
        ):
            return forgotten


def _record(store: ObjectStore, number: int, primaries: Iterable[RecordedPrimary], forgotten: tuple[str, ...]) -> bool:
    """Create the record; return False if its number is taken."""
    record = BaselineRecord(new_operation_id(utc_now()), tuple(primaries), forgotten)
    try:
        # The record is correct even if the put arrives after this command has failed, because the locks were granted.
        create_or_find(store, baseline_key(number), seal(record))
    except ObjectExistsError:
        return False
    return True

"""A chain: a full snapshot and its increments, combined into the state at the last commit.

An increment's commit contains only the changes since the previous commit. A Chain combines them by node or by shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Group, list_names
from cutline.nodes.left_out import LeftOut, LeftOutKind, append_only_of
from cutline.nodes.table_state import TableState
from cutline.snapshots.records.commit import (
    BASE,
    COMMENT_MAX,
    DDL,
    GLOBALS,
    SUMMARIZED_MAX,
    AbsentCopy,
    BackgroundCopy,
    ChainHistory,
    Commit,
    CommitSummary,
    CopiedLater,
    DatabaseFacts,
    DatabaseProperties,
    DefinitionChanges,
    FullSnapshot,
    Increment,
    LostWal,
    NamedObject,
    Renewal,
    Sequence,
    SharedBase,
    StoredObject,
)
from cutline.snapshots.records.merge_records import Merge
from cutline.snapshots.records.repair_records import Repair
from cutline.storage.digest import digest
from cutline.wal.cut.cut_values import NodeCut, Undecided
from cutline.wal.segments.archive import Segment, check_contiguous

T = TypeVar("T")
# The cached values of a Chain that change only with the definitions of tables.
TABLES = ("_groups", "_tables")


class RenewalGap(Struct, frozen=True):
    """A gap before an increment that copied a primary again: no time since the restore point before can be restored.

    `node` is the primary, and `reason` says why its copy could not be continued. If the restore points from
    `lost_since` on may hold transactions that the primary has lost, `lost_after` is the position up to which its server
    has the WAL of their copy; 0/0 if that is unknown.
    """

    increment: int
    node: str
    reason: str
    lost_since: int | None = None
    lost_after: str | None = None

    @property
    def is_loss_known(self) -> bool:
        """Whether it is known up to where the server has the WAL of the copy; then the reason says it, too."""
        return self.lost_after != str(ORIGIN)

    def may_hold_lost(self, increment: int) -> bool:
        """Whether the restore point may hold transactions that the primary has lost."""
        return self.lost_since is not None and self.lost_since <= increment < self.increment


class AppliedRepairs(Struct, frozen=True):
    """The repairs that a chain's commits reflect (snapshots/records/repaired_chain.py).

    `originals` maps the keys of new segments to the segments that the commits list. `listed` maps the keys of object
    lists to the listed objects that were replaced (digests by key).
    """

    repairs: tuple[Repair, ...] = ()
    originals: Mapping[str, Segment] = field(default_factory=dict)
    listed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def new_keys(self) -> frozenset[str]:
        """The keys of all objects that the repairs have stored."""
        return frozenset(new.key for repair in self.repairs for one in repair.replacements for new in one.new)


class MergedBeginning(Struct, frozen=True):
    """What the beginning of a chain was made of, if that is a merge (snapshots/records/merged_chain.py).

    `commit` is that of the increment, and `original` that of the full snapshot, as stored. `archives` and `slots` are
    `archive` and `slot_position` of each node before the merge. Rows may still be stored under definitions that had
    `ended` before the cut; the other fields are those of all definitions, as `successions`, `copy_positions`,
    `tables_read_once` and `pending_at_copies` of a Chain. `copied_at` and the last are keyed by node, the others by
    shard.
    """

    merge: Merge
    commit: Increment
    original: FullSnapshot
    archives: Mapping[str, str]
    slots: Mapping[str, Lsn]
    ended: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)
    successions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    copied_at: Mapping[str, Mapping[int, Lsn]] = field(default_factory=dict)
    read_once: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    pending_at_copies: Mapping[str, Mapping[int, frozenset[Lsn]]] = field(default_factory=dict)


# The dictionary is for cached properties.
class Chain(Struct, frozen=True, dict=True):
    """A full snapshot and its increments up to a given number, from which a state is folded.

    With a `beginning`, `full` is not the commit of a full snapshot: it describes the state at the cut of the merge's
    increment, has its number, and lists the merge's base and segments.

    A partial chain contains only the newest increment and the increments that changed definitions or DDL, which is
    enough to continue it. Its `segments`, `excluded` and `up_to` raise RuntimeError; `commits` and `increments` have
    gaps.

    With repairs, the commits list the objects that supersede damaged ones; their counts and digests are those that are
    stored.

    The commits' entries are grouped by node once, because searching all commits for each node would take time
    proportional to the product of both numbers.
    """

    full: FullSnapshot
    increments: tuple[Increment, ...] = ()
    is_partial: bool = False
    applied: AppliedRepairs = field(default_factory=AppliedRepairs)
    beginning: MergedBeginning | None = None

    @property
    def name(self) -> str:
        """The snapshot's name."""
        return self.full.snapshot

    @cached_property
    def commits(self) -> tuple[Commit, ...]:
        """The commits of the full snapshot and the increments, in order."""
        return (self.full, *self.increments)

    def followed_by(self, increment: Increment) -> Chain:
        """Return the chain with its next increment."""
        chain = replace(self, increments=(*self.increments, increment))
        if not (increment.renewed or increment.retired):
            # Going through all increments and nodes for each increment would take the square of the time.
            known = {
                "renewals": self.renewals,
                "retired": self.retired,
                "parts": self.parts,
                "_nodes": self.nodes,
                "_identities": self._identities,
                "_bases": self.bases,
            }
            chain.__dict__.update(known)
        if increment.definition_changes is None:
            # The tables are the same: thousands of them need not be sorted and looked up again.
            chain.__dict__.update({name: self.__dict__[name] for name in TABLES if name in self.__dict__})
        return chain

    @property
    def last(self) -> Commit:
        """The newest commit."""
        return self.increments[-1] if self.increments else self.full

    def commit_of(self, increment: int) -> Commit:
        """Return the commit of an increment; raise IndexError if the chain begins later or ends before."""
        self._check_whole()
        if increment < self.full.increment:
            raise IndexError(f"chain {self.name} begins at increment {self.full.increment}")
        return self.commits[increment - self.full.increment]

    def commits_after(self, increment: int) -> tuple[Commit, ...]:
        """Return the commits of the chain after an increment."""
        self._check_whole()
        return self.commits[max(increment + 1 - self.full.increment, 0) :]

    @property
    def digest(self) -> str:
        """A digest of everything from which the state is folded: the commits, and what has replaced their objects."""
        number = self.last.increment
        repairs = [
            repair.digest
            for repair in self.applied.repairs
            # What a later merge lists may be listed by these commits as well.
            if any(one.increment <= number or (one.merge and one.has_same_content) for one in repair.replacements)
        ]
        if self.beginning is not None:
            repairs.insert(0, self.beginning.merge.digest)
        return digest("\n".join([self.last.digest, *repairs]).encode()) if repairs else self.last.digest

    def original(self, segment: Segment) -> Segment:
        """Return the segment as the commits list it, if a repair has replaced it; otherwise the segment itself."""
        return self.applied.originals.get(segment.key, segment)

    @property
    def nodes(self) -> tuple[NodeIdentity, ...]:
        """The nodes whose copies the chain holds at the last commit, as they were when their copies began."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[NodeIdentity, ...]:
        retired = self.retired
        return tuple(one for one in self._identities.values() if (one.backup_of or one.node) not in retired)

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """The nodes of which any commit has a copy, those of retired shards included."""
        return tuple(self._identities)

    @cached_property
    def _identities(self) -> Mapping[str, NodeIdentity]:
        identities = {identity.node: identity for identity in self.full.baseline}
        return identities | {node: renewal.identity for node, (_, renewal) in self.renewals.items()}

    @cached_property
    def retired(self) -> Mapping[str, int]:
        """The shards that are no longer part of the chain, with the first increment that lacks them."""
        return {shard: one.increment for one in self.increments for shard in one.retired}

    @cached_property
    def renewals(self) -> Mapping[str, tuple[Increment, Renewal]]:
        """The newest renewal of each node whose copy began again after the full snapshot, with its increment."""
        return {node: (one, renewal) for one in self.increments for node, renewal in one.renewed.items()}

    @cached_property
    def gaps(self) -> tuple[RenewalGap, ...]:
        """The gaps in the times that can be restored, in order. A merge leaves no restore points before a gap."""
        return tuple(gap for one in self.increments for gap in gaps_of(one))

    def begun(self, node: str) -> int:
        """Return the number of the commit with which the node's copy begins: 0, or the increment that renewed it."""
        return self.renewals[node][0].increment if node in self.renewals else 0

    def first_cut(self, node: str) -> int:
        """Return the index in `commits` of the commit with which the node's copy begins."""
        return max(self.begun(node) - self.full.increment, 0)

    def begins_with(self, shard: str, commit: Commit) -> bool:
        """Whether the commit is the first of the chain that has the shard."""
        if isinstance(commit, Increment):
            return shard in commit.renewed and commit.renewed[shard].is_new
        return shard in self.full.groups

    @cached_property
    def parts(self) -> Mapping[str, str | None]:
        """The primary of each standby, by node; None for a primary."""
        return {identity.node: identity.backup_of for identity in self.nodes}

    @property
    def primaries(self) -> tuple[str, ...]:
        """The nodes that are primaries, one for every shard."""
        return tuple(identity.node for identity in self.nodes if identity.backup_of is None)

    @property
    def bases(self) -> Mapping[str, Lsn]:
        """The positions at which the nodes' archives begin: those of their base copies, but for shared ones."""
        return self._bases

    @cached_property
    def _bases(self) -> Mapping[str, Lsn]:
        return {**self.full.base, **{node: renewal.base for node, (_, renewal) in self.renewals.items()}}

    @cached_property
    def complete_at(self) -> Mapping[str, Lsn]:
        """The position from which each node's copy has all tables of its beginning: later than `bases` in few cases."""
        return {**self.bases, **{node: renewal.complete_at for node, (_, renewal) in self.renewals.items()}}

    def archive(self, node: str) -> str:
        """Return the operation that began the node's archive, as in its keys (wal/segments/archive.py)."""
        if node in self.renewals:
            increment, renewal = self.renewals[node]
            return renewal.began_by or increment.operation
        return self.beginning.archives[node] if self.beginning else self.full.chain

    @property
    def renamed(self) -> Mapping[str, str]:
        """The ids in fleet.toml, at the last commit, of the nodes that the chain knows by others."""
        return self.last.renamed

    def listed_id(self, node: str) -> str:
        """Return the node's id in fleet.toml at the last commit."""
        return self.last.renamed.get(node, node)

    @property
    def absent(self) -> Mapping[str, AbsentCopy]:
        """The standbys' copies that end before the last cut, by node."""
        return self.last.absent

    @property
    def copying(self) -> Mapping[str, BackgroundCopy]:
        """The standbys' copies that have begun again and are not complete yet, by node."""
        return self.last.copying

    @property
    def present(self) -> tuple[str, ...]:
        """The nodes whose copies reach the last cut."""
        return tuple(identity.node for identity in self.nodes if identity.node not in self.last.absent)

    @property
    def baseline(self) -> dict[str, NodeIdentity]:
        """The identity of each node when its copy began, with its timeline and database name at the last commit."""
        now, facts = self.last.timelines, self.last.databases
        found: dict[str, NodeIdentity] = {}
        for one in self.nodes:
            of_shard = facts.get(one.backup_of or one.node)
            name = (of_shard.name if of_shard else "") or one.database
            timeline = now.get(one.node, one.timeline)
            is_same = (timeline, name) == (one.timeline, one.database)
            found[one.node] = one if is_same else structs.replace(one, timeline=timeline, database=name)
        return found

    @property
    def system_identifiers(self) -> dict[str, str]:
        """The system identifiers of the nodes."""
        return {identity.node: identity.system_identifier for identity in self.nodes}

    @property
    def all_system_identifiers(self) -> dict[str, str]:
        """The system identifiers of all nodes of which any commit has a copy, those of retired shards included."""
        return {node: identity.system_identifier for node, identity in self._identities.items()}

    @property
    def listed_system_identifiers(self) -> dict[str, str]:
        """The same by the ids that the nodes have in fleet.toml."""
        return {self.listed_id(node): identifier for node, identifier in self.all_system_identifiers.items()}

    def shard_of(self, node: str) -> str:
        """Return the primary whose rows `node` holds; raise KeyError if the chain contains no copy of the node.

        Commits before its retirement contain copies of a retired shard.
        """
        return self._identities[node].backup_of or node

    def up_to(self, increment: int) -> Chain:
        """Return the chain as of `increment`."""
        self._check_whole()
        if increment < self.full.increment:
            raise IndexError(f"chain {self.name} begins at increment {self.full.increment}")
        return replace(self, increments=self.increments[: increment - self.full.increment])

    def segments(self, node: str) -> tuple[Segment, ...]:
        """Return the node's archived segments since its copy began."""
        self._check_whole()
        return self._segments.get(node, ())

    @cached_property
    def _segments(self) -> Mapping[str, tuple[Segment, ...]]:
        found: dict[str, list[Segment]] = {}
        for commit in self.commits:
            for node, segments in commit.segments.items():
                if commit.increment >= self.begun(node):
                    found.setdefault(node, []).extend(segments)
        return {node: tuple(segments) for node, segments in found.items()}

    def archive_begin(self, node: str) -> Lsn:
        """Return the position from which the chain has the node's WAL."""
        segments = self.segments(node) if self._merge_of(node) else ()
        return segments[0].after if segments else self.bases[node]

    def cuts(self, shard: str) -> tuple[NodeCut, ...]:
        """Return the shard's part of each commit's cut, in order; raise KeyError if the cuts do not include it.

        The cuts before the shard joined the chain don't include it.
        """
        return self._cuts[shard]

    def cuts_since(self, node: str) -> tuple[NodeCut, ...]:
        """Return the parts of the node's shard in the cuts of the commits since the node's copy began."""
        count = len(self.commits) - self.first_cut(node)
        return self.cuts(self.shard_of(node))[-count:]

    @cached_property
    def _cuts(self) -> Mapping[str, tuple[NodeCut, ...]]:
        found: dict[str, list[NodeCut]] = {}
        for commit in self.commits:
            for cut in commit.cut.nodes:
                found.setdefault(cut.node, []).append(cut)
        return {shard: tuple(cuts) for shard, cuts in found.items()}

    def newest_segments(self, node: str) -> tuple[Segment, ...]:
        """Return the node's newest segments: at least the last one, and all that reach beyond the last cut's position.

        Unless the chain is partial, these are all segments.
        """
        if not self.is_partial:
            return self.segments(node)
        last = self.last.end_of_archive(node)
        return (last,) if last is not None else self.last.segments[node]

    def archived_to(self, node: str) -> Lsn:
        """Return the position up to which the chain covers the node's WAL: for an idle node, the last finish marker."""
        if node in self.last.absent:
            return self.last.absent[node].last.through
        # The beginning of a merged chain also lists segments of idle nodes.
        segments = () if node in self.last.idle else self.last.segments[node]
        return segments[-1].through if segments else self.last.cut.of(self.shard_of(node)).finish

    def _check_whole(self) -> None:
        if self.is_partial:
            raise RuntimeError(f"only the newest part of chain {self.name} was read")

    @property
    def next_history(self) -> ChainHistory:
        """The history that the next increment's commit will record."""
        last, number = self.last, self.last.increment + 1
        full_digest = self.stored_full.digest
        if self.beginning is not None and last is self.full:
            last = self.beginning.commit
        if isinstance(last, FullSnapshot):
            return ChainHistory(full_digest)
        if last.history is None:
            self._check_whole()
            redefinitions = {
                increment.increment: increment.digest for increment in self.increments if increment.definition_changes
            }
            recent = tuple(map(_brief, self.increments[first_summarized(number) - 1 :]))
            return ChainHistory(full_digest, redefinitions, recent)
        redefinitions = last.history.redefinitions | ({number - 1: last.digest} if last.definition_changes else {})
        summaries, first = (*last.history.recent, _brief(last)), first_summarized(number)
        recent = tuple(summary for summary in summaries if summary.increment >= first)
        return ChainHistory(full_digest, redefinitions, recent)

    def position(self, node: str) -> Lsn:
        """Return the end of the node's part of the state: the position of its primary at the last cut."""
        return self.last.cut.of(self.shard_of(node)).position

    def excluded(self, node: str) -> frozenset[Lsn]:
        """Return the positions of the transactions before `position` that are not part of the state."""
        self._check_whole()
        shard = self.shard_of(node)
        cuts, merge = self.cuts_since(shard), self._merge_of(node)
        earlier = merge.copies[node].rolled_back if merge else ()
        return frozenset({entry.lsn for entry in cuts[-1].undecided}.union(earlier, *(cut.rolled_back for cut in cuts)))

    def undecided(self, node: str) -> tuple[Undecided, ...]:
        """Return the transactions that the last cut leaves undecided on the node's shard."""
        return self.last.cut.of(self.shard_of(node)).undecided

    def counted_from(self, node: str) -> tuple[Lsn, frozenset[Lsn]]:
        """Return the position from which the node's changes count, and those of earlier transactions that count too."""
        if (merge := self._merge_of(node)) is None:
            shared = self.full.shared_bases.get(node) if node not in self.renewals else None
            return (self.full.base[shared.standby], frozenset(shared.pending)) if shared else (ORIGIN, frozenset())
        copy = merge.copies[node]
        return copy.counted_from, frozenset(copy.pending)

    @property
    def stored_full(self) -> FullSnapshot:
        """The commit of the full snapshot, even if the chain begins with a merge."""
        return self.beginning.original if self.beginning else self.full

    @property
    def first_slots(self) -> Mapping[str, Lsn]:
        """The positions at which the slots were created of the nodes with which the chain begins."""
        return self.beginning.slots if self.beginning else self.full.base

    def slot_position(self, node: str) -> Lsn:
        """Return the position at which the node's slot was created."""
        return self.renewals[node][1].base if node in self.renewals else self.first_slots[node]

    def _merge_of(self, node: str) -> Merge | None:
        """Return the merge with which the node's copy begins, if any."""
        return self.beginning.merge if self.beginning and node not in self.renewals else None

    @cached_property
    def definition_changes(self) -> tuple[DefinitionChanges, ...]:
        """The definition changes from all commits that contain any, in order."""
        return tuple(commit.definition_changes for commit in self.commits if commit.definition_changes)

    def definitions(self, node: str) -> dict[int, Group]:
        """Return all definitions, current and ended, under which the node's rows may be stored, keyed by number."""
        shard = self.shard_of(node)
        ended = self.beginning.ended.get(shard, ()) if self.beginning else ()
        lists = [
            ended,
            self.full.groups.get(shard, ()),
            *(changes.groups.get(shard, ()) for changes in self.definition_changes),
        ]
        return {group.number: group for groups in lists for group in groups}

    def groups(self, node: str) -> tuple[Group, ...]:
        """Return the node's groups at the last commit, ordered by name."""
        shard = self.shard_of(node)
        if shard not in self._groups:
            definitions, ended = self.definitions(shard), self._ended(shard)
            groups = [group for number, group in definitions.items() if number not in ended]
            self._groups[shard] = tuple(sorted(groups, key=attrgetter("schema", "table")))
        return self._groups[shard]

    def count_groups(self, node: str) -> int:
        """Return the number of the node's groups at the last commit, without putting them in order."""
        shard = self.shard_of(node)
        known = self._groups.get(shard)
        return len(self.definitions(shard).keys() - self._ended(shard)) if known is None else len(known)

    def _ended(self, shard: str) -> set[int]:
        """Return the numbers of the shard's definitions that have ended."""
        ended = {number for changes in self.definition_changes for number in changes.gone.get(shard, ())}
        if self.beginning is not None:
            ended |= {group.number for group in self.beginning.ended.get(shard, ())}
        return ended

    @cached_property
    def _groups(self) -> dict[str, tuple[Group, ...]]:
        """The results of `groups` by shard, as far as they were needed."""
        return {}

    def successions(self, node: str) -> dict[int, int]:
        """Return each continued definition's number, keyed by the number of the definition that continues it."""
        shard = self.shard_of(node)
        earlier = self.beginning.successions.get(shard, {}) if self.beginning else {}
        return dict(earlier) | {
            new: old for changes in self.definition_changes for new, old in changes.successions.get(shard, {}).items()
        }

    def numbers_at_cut(self, node: str) -> dict[int, int]:
        """Return the group numbers at the last commit, keyed by the numbers under which valid rows are stored."""
        successions = self.successions(node)
        numbers: dict[int, int] = {}
        for group in self.groups(node):
            stored: int | None = group.number
            while stored is not None:
                numbers[stored] = group.number
                stored = successions.get(stored)
        return numbers

    def copy_positions(self, node: str) -> dict[int, Lsn]:
        """Return the positions from which changes count of tables that were copied later than the rest, by number.

        The number is that of the earliest definition, as in `successions`: later ones may continue it.
        """
        successions = self.successions(node)
        positions = dict(self.beginning.copied_at.get(node, {})) if self.beginning and self._merge_of(node) else {}
        positions |= {
            number: at
            for commit in self.commits
            if commit.definition_changes and commit.increment >= self.begun(node)
            for number, at in commit.definition_changes.begun.get(node, {}).items()
        }
        positions = {number: at for number, at in positions.items() if number not in successions}
        for later in self._copied_later(node):
            positions |= dict.fromkeys((_first_of(number, successions) for number in later.numbers), later.position)
        return positions

    def _copied_later(self, node: str) -> tuple[CopiedLater, ...]:
        return self.renewals[node][1].later if node in self.renewals else ()

    def pending_at_copies(self, node: str) -> dict[int, frozenset[Lsn]]:
        """Return the positions of the transactions that count although they precede a copy of a table that lacks them.

        They are keyed by the number of the table, as in `copy_positions`.
        """
        earlier = self.beginning.pending_at_copies.get(node, {}) if self.beginning and self._merge_of(node) else {}
        found = dict(earlier)
        for commit in self.commits:
            changes = commit.definition_changes
            if changes and node in changes.pending and commit.increment >= self.begun(node):
                found |= dict.fromkeys(changes.copied.get(node, {}), frozenset(changes.pending[node]))
        later = [one for one in self._copied_later(node) if one.pending]
        if not (found or later):
            return {}
        numbers, successions = self.numbers_at_cut(node).keys(), self.successions(node)
        found = {number: pending for number, pending in found.items() if number in numbers}
        for one in later:
            firsts = (_first_of(number, successions) for number in one.numbers if number in numbers)
            found |= dict.fromkeys(firsts, frozenset(one.pending))
        return found

    def tables_read_once(self, shard: str) -> Mapping[int, str]:
        """For tables that were copied again, and once for both copies, return the standby that was read, by number."""
        earlier = self.beginning.read_once.get(shard, {}) if self.beginning and self._merge_of(shard) else {}
        found = {number: standby for number, standby in earlier.items() if self._merge_of(standby)}
        for commit in self.commits:
            changes = commit.definition_changes
            standby = changes.readers.get(shard) if changes else None
            if changes and standby and commit.increment >= max(self.begun(shard), self.begun(standby)):
                found |= dict.fromkeys(changes.copied.get(shard, {}), standby)
        return found

    def tables(self, shard: str) -> Mapping[str, TableState]:
        """Return the states of the shard's tables at the last commit, keyed by name."""
        if shard not in self._tables:
            lists = [self.full.tables, *(changes.tables for changes in self.definition_changes)]
            states = {state.table: state for tables in lists for state in tables.get(shard, ())}
            names = list_names(self.groups(shard))
            self._tables[shard] = {name: states[name] for name in names if name in states}
        return self._tables[shard]

    @cached_property
    def _tables(self) -> dict[str, Mapping[str, TableState]]:
        """The results of `tables` by shard, as far as they were needed."""
        return {}

    def roles(self, shard: str) -> tuple[str, ...]:
        """Return the roles that the shard's DDL names at the last commit."""
        return _newest([self.full.roles, *(changes.roles for changes in self.definition_changes)], shard)

    def fingerprint(self, shard: str) -> str:
        """Return the fingerprint of the shard's catalogs at the last commit."""
        return _newest([self.full.fingerprints, *(changes.fingerprints for changes in self.definition_changes)], shard)

    def are_states_of_fingerprint(self, shard: str) -> bool:
        """Whether the states of the shard's tables were read together with its fingerprint, except for their files.

        Later increments may have stored other states. A merge may have combined both.
        """
        for changes in reversed(self.definition_changes):
            if shard in changes.fingerprints:
                return True
            if shard in changes.tables:
                return False
        return self.beginning is None

    def ddl_object(self, shard: str) -> StoredObject | None:
        """Return the archive of the shard's DDL at the last commit; None if no commit lists it."""
        return self._newest_object(DDL, shard)

    def globals_object(self, shard: str) -> StoredObject | None:
        """Return the object with the globals of the shard's server at the last commit; None if no commit lists it."""
        return self._newest_object(GLOBALS, shard)

    def database_facts(self, shard: str) -> DatabaseFacts | None:
        """Return the newest facts about the shard's database; None if no commit contains them."""
        return next((commit.databases[shard] for commit in reversed(self.commits) if shard in commit.databases), None)

    def database_properties(self, shard: str) -> DatabaseProperties | None:
        """Return the newest properties of the shard's database itself; None if they are not recorded."""
        facts = self.database_facts(shard)
        return facts.properties if facts else None

    def session_settings(self, shard: str) -> Mapping[str, str]:
        """Return the newest settings of sessions of the shard's database on which computed values may depend."""
        facts = self.database_facts(shard)
        return facts.session_settings if facts else {}

    def _newest_object(self, kind: str, shard: str) -> StoredObject | None:
        return self._newest_objects.get((kind, shard))

    @cached_property
    def _newest_objects(self) -> Mapping[tuple[str, str], StoredObject]:
        # If DDL changed during a full snapshot, its commit lists the archive of the base copy, then the newest.
        return {(stored.kind, stored.node): stored for commit in self.commits for stored in commit.own_objects}

    def base_of(self, node: str) -> str | None:
        """Return the primary with whose base copy the standby's copy begins (SharedBase); None if it has its own."""
        shared = self.full.shared_bases.get(self.shard_of(node))
        return self.shard_of(node) if shared and shared.standby == node and node not in self.renewals else None

    def base_read_on(self, node: str) -> str:
        """Return the node on which the base copy was read with which the node's copy begins: nearly always itself."""
        shared = self.full.shared_bases.get(node) if node not in self.renewals else None
        return shared.standby if shared else node

    def shared_groups(self, node: str) -> frozenset[int]:
        """Return the numbers under which a standby's copy has rows in the objects of its primary's base copy."""
        primary = self.base_of(node)
        return frozenset(group.number for group in self.full.groups[primary]) if primary else frozenset()

    @property
    def bases_read_once(self) -> Mapping[str, SharedBase]:
        """The shared base copies, by primary, with which the copies of both nodes still begin, merged or not."""
        original = self.stored_full
        return {
            primary: shared
            for primary, shared in original.shared_bases.items()
            if {primary, shared.standby} <= self.parts.keys()
            and {self.archive(primary), self.archive(shared.standby)} == {original.operation}
        }

    def base_entries(self, node: str, after: int | None = None) -> tuple[NamedObject, ...]:
        """Return the entries for the node's base copies: those with which its copy begins, and those of tables since.

        With `after`, return only those of later increments. A partial chain has all of them, since only full snapshots
        and definition changes come with base copies.
        """
        listed = self._base_entries.get(node, ())
        return tuple(entry for increment, entry in listed if after is None or increment > after)

    @cached_property
    def _base_entries(self) -> Mapping[str, Collection[tuple[int, NamedObject]]]:
        found: dict[str, list[tuple[int, NamedObject]]] = {}
        initial: tuple[NamedObject, ...] = (*self.full.copied, *self.full.lists)
        for entry in initial if self.full.shared_bases else ():
            shared = self.full.shared_bases.get(entry.node)
            if entry.kind == BASE and shared is not None and shared.standby not in self.renewals:
                found.setdefault(shared.standby, []).append((self.full.increment, entry))
        for commit in self.commits:
            for entry in commit.entries:
                if entry.kind == BASE and commit.increment >= self.begun(entry.node):
                    found.setdefault(entry.node, []).append((commit.increment, entry))
        return found

    def base_rows(self, node: str) -> Mapping[int, int]:
        """Return the row counts of the node's base copies, keyed by the number under which the rows are stored."""
        rows = Counter[int]()
        for base_entry in self.base_entries(node):
            rows.update(base_entry.rows)
        return rows

    def sequences(self, shard: str) -> tuple[Sequence, ...]:
        """Return the shard's sequences with their values at the last cut."""
        return self.last.sequences[shard]

    @property
    def all_groups(self) -> dict[str, tuple[Group, ...]]:
        """The groups of every shard at the last commit."""
        return {shard: self.groups(shard) for shard in self.primaries}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The data that the newest commit leaves out."""
        return self.last.left_out

    @property
    def too_old(self) -> tuple[LeftOut, ...]:
        """The standbys that have no copy in the chain, because they can't decode WAL. Every output names them."""
        kind, shards = LeftOutKind.STANDBY_COPY, self.parts.keys()
        return tuple(out for out in self.full.left_out if out.kind == kind and out.node in shards)

    @property
    def append_only(self) -> list[str]:
        """The groups for which any shard records only INSERT and TRUNCATE. Every output names them."""
        return sorted({out.name for out in append_only_of(self.all_groups)})

    def check_archive(self) -> None:
        """Raise ArchiveError if a node's segments have a gap between its base and the last cut's finish marker.

        In a partial chain, the check begins with the newest increment's segments. The archive of a node that is idle or
        absent may end before the marker.
        """
        for node in self.parts:
            segments = self.newest_segments(node)
            has_all = self.last.end_of_archive(node) is None
            finish = self.last.cut.of(self.shard_of(node)).finish if has_all else ORIGIN
            begin, first = self.bases[node], 1
            if self._merge_of(node) and not segments:
                # No segment of the node has been stored since the full snapshot.
                continue
            if self.is_partial or self._merge_of(node):
                begin, first = segments[0].after, segments[0].number
            check_contiguous(node, begin, segments, finish, first)


def _first_of(number: int, successions: Mapping[int, int]) -> int:
    """Return the earliest definition that the one with this number continues."""
    while number in successions:
        number = successions[number]
    return number


def first_summarized(increment: int) -> int:
    """Return the earliest increment that the commit of `increment` summarizes."""
    return max((increment - 1) // SUMMARIZED_MAX * SUMMARIZED_MAX, 1)


def summary_of(commit: Commit) -> CommitSummary:
    """Return the summary that `list` shows for a commit."""
    counts = commit.counts
    return CommitSummary(
        commit.increment,
        commit.operation,
        commit.digest,
        commit.created_at,
        commit.seconds,
        counts["changes"],
        counts["transactions"],
        counts["bytes"],
        commit.cut.id,
        commit.cut.made_at,
        commit.cut.safe_at,
        commit.comment,
        commit.terminal,
    )


def _brief(commit: Commit) -> CommitSummary:
    comment = commit.comment
    return structs.replace(
        summary_of(commit), comment=comment if len(comment) <= COMMENT_MAX else f"{comment[: COMMENT_MAX - 1]}…"
    )


def _newest(values: list[Mapping[str, T]], shard: str) -> T:
    return next(by_shard[shard] for by_shard in reversed(values) if shard in by_shard)


def _lost(lost: LostWal | None) -> tuple[int | None, str | None]:
    return (lost.since, str(lost.after)) if lost and lost.since is not None else (None, None)


def gaps_of(commit: Commit) -> tuple[RenewalGap, ...]:
    """Return the gaps before the commit, one for each primary whose copy begins again with it."""
    renewed = commit.renewed if isinstance(commit, Increment) else {}
    return tuple(
        RenewalGap(commit.increment, node, renewal.reason, *_lost(renewal.lost))
        for node, renewal in renewed.items()
        if renewal.identity.backup_of is None and not renewal.is_new
    )

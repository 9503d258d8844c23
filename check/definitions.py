"""Check the stored DDL of a chain against the commits that list it, and against the DDL before it.

A shard's DDL is stored again only if the fingerprint of its catalogs has changed. So facts from the catalogs can't
differ between a commit and the next unless the next commit lists new DDL. Such facts are the tables, their columns and
keys, the sequences and how they count, and which tables are unlogged, foreign or an extension's. A difference without
new DDL is a conflict, and so is DDL that the commit contradicts (snapshots/ddl/contradictions.py).

Everything here is in documents and archives that a check reads anyway. Of each shard's DDL, only one description is
held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from datetime import timedelta

from msgspec import Struct, field, structs

from cutline.check.new_part import NewPart
from cutline.check.own_types import OwnType, joined, own_types, types_of
from cutline.check.report import Conflict, Doubt, Findings
from cutline.check.required_values import Since, follow_required, required_columns
from cutline.check.shard_differences import ShardDifferences
from cutline.check.stored_rows import invalid_older_values
from cutline.fleet.messages import list_some
from cutline.fleet.table_names import is_included, table_name
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.ddl.contradictions import (
    PREDEFINED,
    changed_columns,
    changed_types,
    compare,
    compare_database,
    compare_definitions,
    compare_names,
    compare_sequences,
    is_only_ascii,
)
from cutline.snapshots.ddl.described_ddl import Description, describe
from cutline.snapshots.ddl.dump import read_ddl
from cutline.snapshots.ddl.extension_tables import read_extension_rows_object
from cutline.snapshots.ddl.fingerprint import are_same_objects
from cutline.snapshots.ddl.server_globals_object import read_globals_object
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    DDL,
    EXTENSION_ROWS,
    GLOBALS,
    WITHOUT_ROWS,
    Commit,
    FullSnapshot,
    Increment,
    LostList,
    Sequence,
    StoredObject,
)
from cutline.snapshots.records.proven_chains import commit_key, cut_time, point_label
from cutline.storage.digest import digest
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

NAMED_MAX, SECONDS_APART = 5, 2
# The catalogs alone decide whether such a table or sequence exists.
OF_CATALOGS = frozenset(
    {
        LeftOutKind.UNLOGGED_TABLE,
        LeftOutKind.FOREIGN_TABLE,
        LeftOutKind.EXTENSION_TABLE,
        LeftOutKind.UNLOGGED_SEQUENCE,
    }
)


class StoredDefinitions(Struct):
    """Facts from the stored DDL of each shard that other passes need.

    `newest` is the description of the DDL at the checked increment; a shard whose DDL can't be read has none.
    `own_types` has the types that users have created, by shard and oid. `roles` are all roles that the servers have
    had, by shard; a shard whose globals can't be read has none. `required` says, by shard, since when columns have been
    NOT NULL.
    """

    newest: dict[str, Description] = field(default_factory=dict)
    own_types: dict[str, dict[int, OwnType]] = field(default_factory=dict)
    roles: dict[str, frozenset[str]] = field(default_factory=dict)
    required: dict[str, Since] = field(default_factory=dict)


class _Shard(Struct):
    """The DDL of a shard as far as it was read: the newest archive, and the increment that lists it.

    `increments` maps the digest of the content of each archive to the first increment that lists it. `roles` are those
    of the server's newest globals, and `all_roles` of all; if `lacks_roles`, some could not be read. `superusers` are
    all roles that were superusers in any of them.
    """

    newest: Description | None = None
    listed: tuple[int, StoredObject] | None = None
    increments: dict[str, int] = field(default_factory=dict)
    roles: frozenset[str] | None = None
    all_roles: frozenset[str] = frozenset()
    lacks_roles: bool = False
    superusers: frozenset[str] = frozenset()


def check_definitions(store: ObjectStore, part: NewPart, findings: Findings) -> StoredDefinitions:
    """Read stored DDL, globals and extension rows, and count object lists; report damage and contradictions.

    All DDL and globals of the chain are read, because the labels of enum types and the roles accumulate. Only
    objects in the part are counted, and only its extension rows are read.
    """
    chain = part.chain
    checking = _Checking(store, part, findings, {shard: _Shard() for shard in chain.primaries})
    for commit in chain.commits:
        checking.check(commit)
    checking.note()
    # The bytes of the object lists were verified when the chain was read.
    for object_list in [object_list for commit in part.commits for object_list in commit.object_lists]:
        if not isinstance(object_list, LostList):
            findings.count(objects=1, size_bytes=object_list.size)
    for shard in checking.shards:
        columns = own_types(chain, shard, checking.own_types.get(shard, {}))
        for detail in invalid_older_values(chain.definitions(shard).values(), columns):
            findings.conflict(Conflict("definition", detail, node=shard))
    newest = {name: shard.newest for name, shard in checking.shards.items() if shard.newest is not None}
    known = {name: shard.all_roles for name, shard in checking.shards.items() if not shard.lacks_roles}
    return StoredDefinitions(newest, checking.own_types, known, checking.required)


class _Checking(Struct):
    """The check of a chain's definitions, commit by commit. `reported` has the reported contradictions, by shard."""

    store: ObjectStore
    part: NewPart
    findings: Findings
    shards: dict[str, _Shard]
    own_types: dict[str, dict[int, OwnType]] = field(default_factory=dict)
    differences: ShardDifferences = field(default_factory=ShardDifferences)
    reported: set[tuple[str, str]] = field(default_factory=set)
    required: dict[str, Since] = field(default_factory=dict)

    @property
    def chain(self) -> Chain:
        return self.part.chain

    def check(self, commit: Commit) -> None:
        """Check the objects that a commit lists, and the facts that it must share with the commit before it."""
        chain = self.chain.up_to(commit.increment)
        before = self._before(commit)
        # Shards that have left the chain since are checked up to their last increment (check/verify.py).
        shards = self.shards.keys() & commit.cut.by_node.keys()
        archives, with_roles = self._read_objects(commit, shards)
        with_roles |= set(shards) if before is None else set()
        for name, listed in archives.items():
            *earlier, newest = listed
            for stored in earlier:
                # The archive of a full snapshot's base copy, after which DDL changed before the cut.
                base = Chain(structs.replace(self.chain.full, definition_changes=None))
                if (described := self._read(stored, commit)) is not None:
                    only_ascii = is_only_ascii(base, name)
                    found = compare_definitions(base, name, described, base.groups(name), only_ascii=only_ascii)
                    self._contradicted(found, stored)
                    self.shards[name].newest = described
            # A copy that begins again may be of another history, in which other DDL has the same stamps.
            is_new = isinstance(commit, Increment) and name in commit.renewed
            known = before if before is not None and name in before.parts and not is_new else None
            self._check_newest(chain, known, newest, commit)
            self._follow_required(known, chain, name)
        for name in shards - archives.keys():
            if before is not None and name in before.parts:
                self._check_unchanged(before, chain, name)
            self._check_values(chain, name, commit)
        self._check_listed(commit, archives.keys())
        for name in sorted(with_roles):
            self._check_roles(chain, name)
        if before is not None and before.primaries != chain.primaries:
            self.differences.begin_again()
        if archives:
            self.differences.add(chain, before, {name: self.shards[name].newest for name in sorted(shards)})

    def _read_objects(self, commit: Commit, shards: Set[str]) -> tuple[dict[str, list[StoredObject]], set[str]]:
        """Read what the commit lists of these shards, except for archives of DDL; return those by shard.

        Also returns the shards with new DDL or globals.
        """
        archives: dict[str, list[StoredObject]] = {}
        with_roles = set[str]()
        for stored in (stored for stored in commit.own_objects if stored.kind in WITHOUT_ROWS):
            if stored.node not in commit.cut.by_node:
                self._conflict(f"the commit lists {stored.kind} of node {stored.node}, which is no primary", stored)
            elif stored.node not in shards:
                continue
            elif stored.kind == DDL:
                archives.setdefault(stored.node, []).append(stored)
                with_roles.add(stored.node)
            else:
                self._read_other(stored, commit)
                with_roles |= {stored.node} if stored.kind == GLOBALS else set()
        return archives, with_roles

    def _follow_required(self, before: Chain | None, chain: Chain, name: str) -> None:
        """Note which columns are NOT NULL after new DDL. Without new DDL, they are the same."""
        known, described = self.required.pop(name, {}), self.shards[name].newest
        if described is not None:
            required = required_columns(chain, name, described)
            self.required[name] = follow_required(before, chain, name, known, required)

    def _check_listed(self, commit: Commit, with_ddl: Set[str]) -> None:
        """Check that a full snapshot has DDL and globals of all shards, and that a commit's roles and sequences fit."""
        new = self.shards.keys() & {cut.node for cut in commit.cut.nodes if self.chain.begins_with(cut.node, commit)}
        if not self.chain.full.only_cut:
            with_globals = {stored.node for stored in commit.own_objects if stored.kind == GLOBALS}
            point = point_label(commit.increment)
            for kind, what, listed in (("definition", "DDL", with_ddl), ("roles", "server globals", with_globals)):
                for shard in sorted(new - listed):
                    self.findings.conflict(Conflict(kind, f"{point} lists no {what}", node=shard))
        for shard in sorted(commit.databases.keys() & self.shards.keys()):
            self._check_properties(commit, shard)
        for shard, sequences in commit.sequences.items():
            counts = Counter((one.schema, one.name) for one in sequences)
            for schema, name in sorted(key for key, count in counts.items() if count > 1):
                detail = f"{point_label(commit.increment)} has several values of sequence {table_name(schema, name)}"
                self.findings.conflict(Conflict("definition", detail, node=shard))

    def _before(self, commit: Commit) -> Chain | None:
        """Return the chain that the commit continues; None for a full snapshot without changes before its cut."""
        if not isinstance(commit, FullSnapshot):
            return self.chain.up_to(commit.increment - 1)
        return Chain(structs.replace(commit, definition_changes=None)) if commit.definition_changes else None

    def _read(self, stored: StoredObject, commit: Commit) -> Description | None:
        """Read and describe an archive; report damage, and an archive that is a copy of an earlier one."""
        shard = self.shards[stored.node]
        try:
            ddl = read_ddl(read_listed(self.store, stored.node, stored.key, (stored.size, stored.digest)), stored)
        except ObjectDamagedError as error:
            self._damaged(error, stored)
            return None
        self._count(stored, commit)
        # An archive contains the second in which it was written.
        earlier = shard.increments.setdefault(digest(ddl.body), commit.increment)
        if earlier != commit.increment and not _follows_at_once(self.chain, earlier, commit.increment):
            self._conflict(f"the DDL is the archive that {point_label(earlier)} lists, byte for byte", stored)
        self._contradicted(compare_names(ddl), stored)
        described = describe(ddl)
        known = self.own_types.setdefault(stored.node, {})
        for oid, type_ in types_of(described).items():
            known[oid] = joined(known.get(oid, type_), type_)
        return described

    def _count(self, stored: StoredObject, commit: Commit) -> None:
        if self.part.has(commit):
            self.findings.count(objects=1, size_bytes=stored.size)

    def _read_other(self, stored: StoredObject, commit: Commit) -> None:
        if stored.kind == EXTENSION_ROWS and not self.part.has(commit):
            return
        try:
            if stored.kind == GLOBALS:
                shard, found = self.shards[stored.node], read_globals_object(self.store, stored)
                shard.roles = frozenset(role.name for role in found.roles)
                if len(shard.roles) < len(found.roles):
                    detail = "the stored roles of the server contain a role several times"
                    self.findings.conflict(Conflict("roles", detail, node=stored.node, object=stored.key))
                if unknown := found.unknown_roles:
                    detail = f"the globals of the server name {list_some(unknown, NAMED_MAX)}, which is no role of it"
                    self.findings.conflict(Conflict("roles", detail, node=stored.node, object=stored.key))
                shard.all_roles |= shard.roles
                shard.superusers |= {role.name for role in found.roles if role.superuser}
            elif stored.kind == EXTENSION_ROWS:
                read_extension_rows_object(self.store, stored)
        except ObjectDamagedError as error:
            self._damaged(error, stored)
        else:
            self._count(stored, commit)

    def _damaged(self, error: ObjectDamagedError, stored: StoredObject) -> None:
        # The object contains no table rows, so the copy can still be compared.
        self.findings.conflict(Conflict(error.kind, error.message, node=stored.node, object=stored.key))
        shard = self.shards[stored.node]
        if stored.kind == DDL:
            shard.newest = None
        elif stored.kind == GLOBALS:
            shard.roles, shard.lacks_roles = None, True

    def _conflict(self, detail: str, stored: StoredObject) -> None:
        self.findings.conflict(Conflict("definition", detail, node=stored.node, object=stored.key))

    def _contradicted(self, details: Iterable[str], stored: StoredObject) -> None:
        for detail in details:
            self.reported.add((stored.node, detail))
            self._conflict(detail, stored)

    def _check_newest(self, chain: Chain, before: Chain | None, stored: StoredObject, commit: Commit) -> None:
        """Check the archive of a shard's DDL at a commit, and compare it with the archive before it."""
        name, shard = stored.node, self.shards[stored.node]
        earlier, described = shard.newest, self._read(stored, commit)
        if before is not None and _is_dumped_again(before, chain, name):
            self._conflict("the commit lists new DDL, but the fingerprint of the catalogs has not changed", stored)
        if described is None:
            return
        shard.newest, shard.listed = described, (commit.increment, stored)
        self._contradicted(compare(chain, name, described), stored)
        if earlier is not None and before is not None and earlier.writer == described.writer:
            for detail in _changed_without_stamp(before, chain, name, earlier, described):
                self._conflict(detail, stored)

    def note(self) -> None:
        """Add the doubts about the newest DDL of each shard."""
        for shard in self.shards.values():
            if shard.newest is not None and shard.listed is not None:
                increment, stored = shard.listed
                self._note_unlisted(self.chain.up_to(increment), shard.newest, stored)
        self.differences.note(self.findings)

    def _note_unlisted(self, chain: Chain, described: Description, stored: StoredObject) -> None:
        """Note tables that the rules exclude, but that the commit does not list as left out."""
        listed = {(group.schema, group.table) for group in chain.groups(stored.node)}
        left_out = {out.name for out in chain.left_out if out.node == stored.node}
        only_ascii = is_only_ascii(chain, stored.node)
        names = [table_name(*table) for table in sorted(described.tables.keys() - listed)]
        unlisted = [
            name
            for name in names
            if name not in left_out and not is_included(name, chain.full.rules) and (name.isascii() or not only_ascii)
        ]
        if unlisted:
            detail = f"the commit does not say that it leaves out {list_some(unlisted, NAMED_MAX)}"
            self.findings.doubt(Doubt("left-out", detail, node=stored.node, object=stored.key))
        # The tables are listed after the catalogs are read. ALTER TABLE … SET LOGGED, and back, leaves no trace there.
        unlogged = [
            name for name in (table_name(*table) for table in sorted(described.unlogged)) if name not in left_out
        ]
        if named := [name for name in unlogged if name.isascii() or not only_ascii]:
            detail = (
                f"the DDL has unlogged tables that the commit does not list as left out: {list_some(named, NAMED_MAX)};"
                " somebody changed the store, or made them logged and unlogged again during the create"
            )
            self.findings.doubt(Doubt("left-out", detail, node=stored.node, object=stored.key))

    def _check_unchanged(self, before: Chain, chain: Chain, name: str) -> None:
        """Compare the catalogs in a commit without new DDL of the shard with those in the previous commit."""
        details = [*_changed_sequences(before.sequences(name), chain.sequences(name))]
        changes = chain.last.definition_changes
        if changes and (name in changes.groups or name in changes.gone):
            details += _changed_definitions(before, chain, name)
        if before.last.increment != chain.last.increment:
            details += _changed_left_out(before.left_out, chain.left_out, name)
        for detail in details:
            what = f"{point_label(chain.last.increment)} lists no new DDL, but {detail}"
            self.findings.conflict(Conflict("definition", what, node=name))

    def _check_values(self, chain: Chain, name: str, commit: Commit) -> None:
        """Compare the commit with the newest DDL of the shard, because a restore runs that.

        If the commit changes no tables, compares only the values of sequences and the properties of the database,
        except at the checked increment.
        """
        described, listed = self.shards[name].newest, self.shards[name].listed
        if described is None or self.chain.full.only_cut:
            return
        changes = commit.definition_changes
        is_changed = changes is not None and any(name in of for of in (changes.groups, changes.gone, changes.tables))
        is_whole = is_changed or commit.increment == self.chain.last.increment
        details = compare(chain, name, described) if is_whole else compare_sequences(chain, name, described)
        details += [] if is_whole else compare_database(chain, name, described)
        for detail in details:
            if (name, detail) not in self.reported:
                self.reported.add((name, detail))
                where = f"{point_label(commit.increment)}: {detail}"
                key = listed[1].key if listed is not None else None
                self.findings.conflict(Conflict("definition", where, node=name, object=key))

    def _check_roles(self, chain: Chain, name: str) -> None:
        """Check that the server's globals contain the roles that the shard's DDL needs."""
        known = self.shards[name].roles
        roles = [role for role in chain.roles(name) if not role.startswith(PREDEFINED) and role.isascii()]
        if known is not None and (missing := sorted(set(roles) - known)):
            stored = chain.globals_object(name)
            detail = f"the stored roles of the server lack {list_some(missing, NAMED_MAX)}, which the DDL needs"
            self.findings.conflict(Conflict("roles", detail, node=name, object=stored.key if stored else None))
        self._check_grantees(chain, name)

    def _check_grantees(self, chain: Chain, name: str) -> None:
        """Check that the commit lists the roles to which the shard's DDL grants privileges or applies policies.

        pg_shdepend, from which a create reads the roles, leaves out the bootstrap superuser. Its name is not known, but
        from PostgreSQL 16 on it stays a superuser.
        """
        shard, listed = self.shards[name], set(chain.roles(name))
        described = shard.newest
        if described is None or shard.roles is None or shard.lacks_roles or described.server < (16,):
            return
        unlisted = sorted(
            role
            for role in described.grantees - listed - shard.superusers
            if not role.startswith(PREDEFINED) and is_plain_role(role)
        )
        if not unlisted:
            return
        named = list_some(unlisted, NAMED_MAX)
        detail = f"the DDL grants privileges or applies policies to {named}, which the commit does not list"
        self.findings.conflict(
            Conflict("roles", detail, node=name, object=commit_key(chain.name, chain.last.increment))
        )

    def _check_properties(self, commit: Commit, name: str) -> None:
        """Check that the server's globals contain the roles that the properties of the database name."""
        known, properties = self.shards[name].roles, commit.databases[name].properties
        if known is None or properties is None:
            return
        named = {properties.owner, *(setting.role for setting in properties.settings)}
        named |= {role for one in properties.privileges or () for role in (one.grantee, one.grantor)}
        missing = sorted(role for role in named - known - {""} if not role.startswith(PREDEFINED))
        detail = f"the stored roles of the server lack {list_some(missing, NAMED_MAX)}, which the database needs"
        if missing and (name, detail) not in self.reported:
            self.reported.add((name, detail))
            key = commit_key(self.chain.name, commit.increment)
            self.findings.conflict(
                Conflict("roles", f"{point_label(commit.increment)}: {detail}", node=name, object=key)
            )


def is_plain_role(role: str) -> bool:
    """Whether the DDL has a role's name as commits have it, and not the oid of a role that was dropped."""
    return role.isascii() and "\\x" not in role and not role.isdigit()


def _follows_at_once(chain: Chain, one: int, other: int) -> bool:
    """Whether two cuts were made so shortly after each other that the DDL may have been dumped in the same second."""
    times = [cut_time(chain.commit_of(number)) for number in (one, other)]
    return abs(times[0] - times[1]) < timedelta(seconds=SECONDS_APART)


def _is_dumped_again(before: Chain, chain: Chain, shard: str) -> bool:
    """Whether the last commit lists new DDL of the shard although its catalogs have not changed."""
    changes = chain.last.definition_changes
    if changes is None or shard not in changes.fingerprints or shard not in before.full.fingerprints:
        return False
    return are_same_objects(before.fingerprint(shard), chain.fingerprint(shard))


def _changed_without_stamp(
    before: Chain, chain: Chain, shard: str, earlier: Description, described: Description
) -> Iterator[str]:
    """Yield how columns of tables, and their types, differ from the DDL before although their stamps are the same."""
    was, now = before.tables(shard), chain.tables(shard)
    for group in chain.groups(shard):
        name = (group.schema, group.table)
        one, other = was.get(group.name), now.get(group.name)
        if one is None or other is None or one.oid != other.oid:
            continue
        for detail in changed_types(one, other, (earlier, described)):
            yield f"table {group.name}: {detail}, but the commit says that this has not changed"
        if one.columns != other.columns:
            continue
        tables = [tables.get(name) for tables in (earlier.tables, described.tables)]
        if all(table is not None and table.is_ordered for table in tables):
            for detail in changed_columns(name, earlier, described):
                yield f"table {group.name}: {detail}, but the commit says that its columns have not changed"


def _changed_sequences(was: Iterable[Sequence], now: Iterable[Sequence]) -> Iterator[str]:
    """Yield how the sequences differ, except for their values."""
    before, after = (
        {(one.schema, one.name): (one.increment, one.cycles, one.smallest, one.largest) for one in sequences}
        for sequences in (was, now)
    )
    for schema, name in sorted(before.keys() - after.keys()):
        yield f"sequence {table_name(schema, name)} is gone"
    for schema, name in sorted(after.keys() - before.keys()):
        yield f"sequence {table_name(schema, name)} is new"
    for schema, name in sorted(before.keys() & after.keys()):
        if before[schema, name] != after[schema, name]:
            yield f"sequence {table_name(schema, name)} counts differently"


def _changed_definitions(before: Chain, chain: Chain, shard: str) -> Iterator[str]:
    """Yield how the tables differ. Rules in the fleet file may exclude tables, and no longer exclude them."""
    was, now = ({group.name: group for group in one.groups(shard)} for one in (before, chain))
    excluded = _names(before.left_out, shard, {LeftOutKind.EXCLUDED_TABLE})
    excluded |= _names(chain.left_out, shard, {LeftOutKind.EXCLUDED_TABLE})
    for name in sorted((was.keys() ^ now.keys()) - excluded):
        yield f"table {name} is {'gone' if name in was else 'new'}"
    for name in sorted(was.keys() & now.keys()):
        if was[name].definition() != now[name].definition():
            yield f"table {name} has another definition"


def _changed_left_out(was: Iterable[LeftOut], now: Iterable[LeftOut], shard: str) -> Iterator[str]:
    before, after = (_names(left_out, shard, OF_CATALOGS) for left_out in (was, now))
    for name in sorted(before ^ after):
        yield f"{name} is {'no longer' if name in before else 'newly'} listed as left out"


def _names(left_out: Iterable[LeftOut], shard: str, kinds: Iterable[LeftOutKind]) -> set[str]:
    return {out.name for out in left_out if out.node == shard and out.kind in kinds}

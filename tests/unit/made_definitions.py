"""A chain that PostgreSQL's servers wrote, with its DDL, to be changed as somebody does who seals what is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import zstandard
from msgspec import structs

from cutline.check.definitions import StoredDefinitions, check_definitions
from cutline.check.new_part import NewPart
from cutline.check.report import Findings, SnapshotReport
from cutline.nodes.groups import Group
from cutline.snapshots.ddl.ddl_archive import DdlArchive, rewrite, statements_of_entry
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DDL, Commit, StoredObject
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.storage.open import open_store
from cutline.storage.store import ObjectStore

KEPT = Path(__file__).parents[1] / "kept" / "plain"
STORES = count()


@dataclass(frozen=True, slots=True)
class MadeChain:
    """A chain, and a store with the objects that its commits list themselves."""

    store: ObjectStore
    chain: Chain

    @classmethod
    def kept(cls) -> MadeChain:
        """The kept chain: a full snapshot and two increments with new DDL, of two shards."""
        source, store = open_store(f"file://{KEPT}", {}), InMemoryStore(f"memory://made-definitions-{next(STORES)}")
        chain = read_chain(source, "daily")
        for stored in (one for commit in chain.commits for one in commit.own_objects):
            store.create(stored.key, source.read(stored.key))
        return cls(store, chain)

    def checked(self, after: int | None = None) -> tuple[Findings, StoredDefinitions]:
        """Check the definitions; with `after`, as a check of what is new since that increment does."""
        findings = Findings(SnapshotReport(self.chain.name, self.chain.last.increment))
        return findings, check_definitions(self.store, NewPart(self.chain, after), findings)

    @property
    def conflicts(self) -> list[str]:
        """The details of all conflicts."""
        return [conflict.detail for conflict in self.checked()[0].report.conflicts]

    @property
    def doubts(self) -> list[str]:
        """The details of all doubts."""
        return [doubt.detail for doubt in self.checked()[0].report.doubts]

    def ddl(self, shard: str, increment: int) -> DdlArchive:
        """The DDL of a shard at an increment."""
        return read_stored_ddl(self.store, self.chain.up_to(increment), shard)

    def with_commit(self, increment: int, change: Callable[[Any], Commit]) -> MadeChain:
        """The chain with one commit changed."""
        commits = [change(one) if one.increment == increment else one for one in self.chain.commits]
        full, *increments = commits
        return replace(self, chain=structs.replace(self.chain, full=full, increments=tuple(increments)))

    def with_ddl(self, shard: str, increment: int, ddl: DdlArchive) -> MadeChain:
        """The chain with another content of the DDL that an increment lists, and its size and digest in the commit."""
        body = zstandard.compress(ddl.body)

        def changed(stored: StoredObject) -> StoredObject:
            if (stored.kind, stored.node) != (DDL, shard):
                return stored
            self.store.delete(stored.key)
            self.store.create(stored.key, body)
            return structs.replace(stored, size=len(body), digest=digest(body))

        def change(commit: Any) -> Commit:
            if commit.increment == 0:
                return structs.replace(commit, copied=tuple(map(changed, commit.copied)))
            changes = commit.definition_changes
            objects = tuple(map(changed, changes.objects))
            return structs.replace(commit, definition_changes=structs.replace(changes, objects=objects))

        return self.with_commit(increment, change)

    def with_changes(self, increment: int, **values: Any) -> MadeChain:
        """The chain with other definition changes of an increment."""
        return self.with_commit(
            increment,
            lambda one: structs.replace(one, definition_changes=structs.replace(one.definition_changes, **values)),
        )

    def unchanged(self) -> MadeChain:
        """The chain with another increment, which changed neither definitions nor DDL."""
        last = self.chain.increments[-1]
        following = structs.replace(
            last, increment=last.increment + 1, operation="20261127T041200Z-0123456789", definition_changes=None,
            created_at="2026-11-27T04:12:00Z",
        )  # fmt: skip
        return replace(self, chain=structs.replace(self.chain, increments=(*self.chain.increments, following)))


def altered(ddl: DdlArchive, changes: Mapping[str, tuple[str, str]], *, owner: str | None = None) -> DdlArchive:
    """The archive with a text replaced in the statements of entries, by `KIND name`; perhaps with another owner."""
    statements, owners = dict[int, str](), dict[int, str]()
    for entry in ddl.contents.entries:
        label = f"{entry.kind} {entry.name}"
        if label in changes:
            before, after = changes[label]
            text = statements_of_entry(ddl.body, entry)
            assert before in text, text
            statements[entry.number] = text.replace(before, after)
            if owner is not None:
                owners[entry.number] = owner
    assert len(statements) == len(changes), changes
    return DdlArchive.of(rewrite(ddl.body, ddl.contents, statements, owners=owners))


def group_of(chain: Chain, shard: str, table: str) -> Group:
    """The newest definition of a table."""
    return next(group for group in chain.groups(shard) if group.table == table)

"""Try cases, and count what each command made of them, by kind of document."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.cli.output.failure import CONFLICTS
from cutline.fleet.progress import Silent
from cutline.storage.errors import SnapshotError
from tests.mutations.recipe import recipe_of
from tests.mutations.sealing import read_documents
from tests.mutations.trial import (
    ACCEPTED,
    COMMANDS,
    HANG,
    REFUSED,
    TRACEBACK,
    Outcome,
    changed_store,
    comparable,
    name_of,
    run_command,
)
from tests.mutations.values import Mutation, collect_others, differences, mutations_of, path_text
from tests.mutations.verdicts import is_descriptive, is_sole
from tests.mutations.world import DELETED_NAME, ENDED_NAME, NAME, PRUNED_NAME, World, restore_and_read
from tests.stores.documents import kind_of

KINDS_OF_OUTCOME = (REFUSED, ACCEPTED, TRACEBACK, HANG)
# What became of those that show a changed value, or of which a restore would read other things: the whole check and the
# whole restore were run. EQUAL: every row and sequence is as without the change. ALONE: nothing else tells the value.
EQUAL, REFUSED_LATE, FOUND, ALONE = "restored equal", "refused by restore", "found by check", "recorded once"
AFTERWARDS = (EQUAL, REFUSED_LATE, FOUND, ALONE)
# Of what a command shows differently, so many places are named.
PATHS_SHOWN_MAX = 5
# Only the marks of these matter: their commits are the chain's own.
COPIES = tuple(
    f"snapshots/{name}/{rest}" for name in (DELETED_NAME, PRUNED_NAME, ENDED_NAME) for rest in ("snapshot", "incr")
)


@dataclass(slots=True)
class Trial:
    """A world with its documents, and what was found in it."""

    world: World
    seed: int
    documents: Mapping[str, Any]
    others: Mapping[str, list[Any]]
    originals: Mapping[tuple[str, str], Outcome]
    recipe: Any
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    restored: Any = None

    @classmethod
    def of(cls, world: World, seed: int) -> Trial:
        """Read all documents, and run every command on the store as it is."""
        documents = read_documents(world.store)
        originals = {(name, command): run_command(world, name, command) for name in world.names for command in COMMANDS}
        restored = restore_and_read(world)
        others = collect_others(documents)
        return cls(world, seed, documents, others, originals, recipe_of(world), restored=restored)

    def cases(self) -> list[Mutation]:
        """Every mutation of every document, in an order that the seed draws."""
        keys = [key for key in self.documents if not key.startswith(COPIES)]
        cases = [mutation for key in keys for mutation in mutations_of(key, self.documents[key])]
        random.Random(self.seed).shuffle(cases)
        return cases

    def run(self, cases: Iterable[Mutation]) -> None:
        """Try the cases; note tracebacks, hangs, and values that are shown changed although they do not describe."""
        for mutation in cases:
            with changed_store(self.world, self.documents, mutation, self.others, self.seed) as changed:
                if changed is not None:
                    self._run_one(mutation, changed)

    def _run_one(self, mutation: Mutation, changed: Any) -> None:
        kind, name = kind_of(mutation.key), name_of(mutation.key)
        outcomes = [run_command(self.world, name, command) for command in COMMANDS]
        shown: list[str] = []
        for outcome in outcomes:
            self.counts[kind.name if kind else "?", outcome.command, outcome.kind] += 1
            if outcome.kind in (TRACEBACK, HANG):
                self.failed.append(f"{mutation}: {outcome.command}: {outcome.kind} {str(outcome.document)[:500]}")
            elif outcome.kind == ACCEPTED and not is_descriptive(mutation, self.documents[mutation.key], changed):
                original, found = (
                    comparable(self.originals[name, outcome.command].document),
                    comparable(outcome.document),
                )
                if found != original:
                    paths = [path_text(path) for path in differences(original, found)]
                    shown.append(f"{outcome.command} ({', '.join(paths[:PATHS_SHOWN_MAX])})")
        is_planned = outcomes[-1].kind == ACCEPTED
        if name == NAME and (shown or (is_planned and recipe_of(self.world) != self.recipe)):
            result = self._judge(mutation, is_planned=is_planned, is_shown=bool(shown))
            if result:
                self.counts[kind.name if kind else "?", "restore --dry-run", result] += 1
            else:
                self.failed.append(f"{mutation}: check says valid, and {' and '.join(shown) or 'a restore'} is another")

    def _judge(self, mutation: Mutation, *, is_planned: bool, is_shown: bool) -> str:
        """What the whole restore and the whole check make of the store; "" if they accept what is wrong."""
        try:
            if is_planned and restore_and_read(self.world) == self.restored and not is_shown:
                return EQUAL
        except SnapshotError:
            return REFUSED_LATE
        except Exception as error:  # noqa: BLE001  # what a command would report as a bug
            self.failed.append(f"{mutation}: restore: {TRACEBACK} {str(error)[-500:]}")
            return REFUSED_LATE
        report = check_snapshots(self.world.fleet, CheckRequest(NAME), self.world.spark, Silent())
        if report.exit_code == CONFLICTS:
            return FOUND
        return ALONE if is_sole(mutation.path) else ""

    def lines(self) -> Iterable[str]:
        """The table: a line for every kind of document and command."""
        names = (*KINDS_OF_OUTCOME, *AFTERWARDS)
        yield "| document | command | cases | " + " | ".join(names) + " |"
        yield "|---" * (3 + len(names)) + "|"
        for kind, command in sorted({(kind, command) for kind, command, _ in self.counts}):
            found = [self.counts[kind, command, name] for name in names]
            cases = sum(found[: len(KINDS_OF_OUTCOME)])
            yield f"| {kind} | {command} | {cases} | " + " | ".join(map(str, found)) + " |"

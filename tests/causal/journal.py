"""What the clients of the causal workload were told, and whether the increments agree with that.

A client notes when it sent the decision of a transaction and when it was told that it holds. A command that takes
an increment has a beginning and an end too. What was told before the beginning has to be in the increment; what was
sent after the end can't be; what was rolled back never is; and what is in an increment is in all later ones, unless
a deletion took it. All times are time.monotonic() of one process, so that they compare.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.causal.state import Row

NEVER = math.inf


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction as its client knows it; `gid` names a two-phase one. Times are NEVER until it happens.

    `prepared`: all its parts prepared. `decided`: the first COMMIT (PREPARED) or ROLLBACK PREPARED about to be sent.
    `sent`, `told`: the first COMMIT about to be sent, and answered; NEVER if rolled back. `last_sent`: the last one.
    `is_tagged`: its first part is committed in one phase, by a coordinator.
    """

    gid: str = ""
    inserts: tuple[Row, ...] = ()
    deletes: tuple[Row, ...] = ()
    shards: tuple[int, ...] = ()
    prepared: float = NEVER
    decided: float = NEVER
    sent: float = NEVER
    told: float = NEVER
    last_sent: float = NEVER
    is_tagged: bool = False

    def must_be_in(self, taken: Taken) -> bool:
        """Whether an increment without it has lost it."""
        return self.told < taken.started

    def may_be_in(self, taken: Taken) -> bool:
        """Whether an increment can have it."""
        return self.sent <= taken.returned

    def is_held_over(self, taken: Taken) -> bool:
        """Whether it was prepared everywhere and decided nowhere, all the time that the increment was taken."""
        return self.prepared < taken.started and self.decided > taken.returned

    def is_half_committed_over(self, taken: Taken) -> bool:
        """Whether it was committed on some shards only, all the time that the increment was taken."""
        return self.told < taken.started and self.last_sent > taken.returned


@dataclass(frozen=True, slots=True)
class Taken:
    """One increment: when its command was started and when it had returned, and the rows that it restores to."""

    number: int
    started: float
    returned: float
    rows: frozenset[Row] = frozenset()


@dataclass(slots=True)
class _Fate:
    """What the journal has about one row."""

    inserted: Transaction
    deleted: list[Transaction] = field(default_factory=list)


def disagreements(journal: Iterable[Transaction], increments: Sequence[Taken]) -> list[str]:
    """Everything in which the increments (in order) and the clients' journal disagree, in words."""
    transactions = list(journal)
    fates = {row: _Fate(one) for one in transactions for row in one.inserts}
    for one in transactions:
        for row in one.deletes:
            fates[row].deleted.append(one)
    found: list[str] = []
    for taken in increments:
        unknown = sorted(taken.rows - fates.keys(), key=str)
        found += [f"increment {taken.number} has {row}, which nobody wrote" for row in unknown]
        for row, fate in fates.items():
            found += _disagreements_on(row, fate, taken)
        found += _torn(transactions, taken)
    for earlier, later in itertools.pairwise(increments):
        for row in earlier.rows - later.rows:
            if row in fates and not any(one.may_be_in(later) for one in fates[row].deleted):
                found.append(f"{row} is in increment {earlier.number} and not in {later.number}")
    return [*found, *_come_back(increments)]


def _disagreements_on(row: Row, fate: _Fate, taken: Taken) -> Iterator[str]:
    inserted, where = fate.inserted, f"increment {taken.number}"
    name = f"{row} of {inserted.gid or 'a local transaction'}"
    if row in taken.rows:
        if not inserted.may_be_in(taken):
            yield f"{where} has {name}, which was {'committed later' if inserted.sent < NEVER else 'never committed'}"
        if any(one.must_be_in(taken) for one in fate.deleted):
            yield f"{where} has {name}, which was deleted before it began"
    elif inserted.must_be_in(taken) and not any(one.may_be_in(taken) for one in fate.deleted):
        yield f"lost: {where} has not {name}, which was committed before it began"


def _torn(transactions: Iterable[Transaction], taken: Taken) -> Iterator[str]:
    """Transactions of which the increment has a part; a part that was deleted since tells nothing."""
    gone: set[Row] = {row for one in transactions if one.may_be_in(taken) for row in one.deletes}
    for one in transactions:
        present = [row in taken.rows for row in one.inserts if row not in gone]
        kept = [row in taken.rows for row in one.deletes if one.inserts == ()]
        if any(present) and not all(present):
            yield f"torn: increment {taken.number} has a part of {one.gid or one.inserts}"
        if one.may_be_in(taken) and any(kept) and not all(kept):
            yield f"torn: increment {taken.number} has a part of what {one.gid} deleted"


def _come_back(increments: Sequence[Taken]) -> Iterator[str]:
    gone: dict[Row, int] = {}
    for earlier, later in itertools.pairwise(increments):
        yield from (f"{row} came back in increment {later.number}" for row in later.rows & gone.keys())
        gone |= {row: later.number for row in earlier.rows - later.rows}


@dataclass(frozen=True, slots=True)
class Occurred:
    """What the journal shows to have happened around the increments, so that a run proves something.

    `held` transactions were open over two increments or more, `rolled_back` of them in the end. `half` were committed
    on one shard only over two or more: `early` counts all of such transactions and increments. `trims` deleted.
    `tagged` had a coordinator that committed its part in one phase.
    """

    transactions: int
    links: int
    trims: int
    tagged: int
    held: int
    rolled_back: int
    half: int
    early: int


def occurred(journal: Iterable[Transaction], increments: Sequence[Taken]) -> Occurred:
    """Count what happened, from the clients' times alone."""
    spans: dict[str, dict[Transaction, int]] = defaultdict(lambda: defaultdict(int))
    transactions = list(journal)
    for one in transactions:
        for taken in increments:
            spans["held"][one] += one.is_held_over(taken)
            spans["half"][one] += one.is_half_committed_over(taken)
    held = [one for one, count in spans["held"].items() if count >= 2]
    return Occurred(
        transactions=sum(one.told < NEVER for one in transactions),
        links=sum(one.told < NEVER and any(row[0] == "child" for row in one.inserts) for one in transactions),
        trims=sum(one.told < NEVER and bool(one.deletes) for one in transactions),
        tagged=sum(one.told < NEVER and one.is_tagged for one in transactions),
        held=len(held),
        rolled_back=sum(one.decided < NEVER and one.sent == NEVER for one in held),
        half=sum(count >= 2 for count in spans["half"].values()),
        early=sum(spans["half"].values()),
    )

"""The journal of the causal workload's clients, and its comparison with the increments.

A client records when it sent the decision on a transaction and when the decision was acknowledged. The command that
creates an increment has a start and an end, too. A commit that was acknowledged before the start must be in the
increment, and a commit that was sent after the end must not be in it. A transaction that was rolled back is never in
it. A row in an increment is in all later increments, unless it was deleted. All times are time.monotonic() of one
process, so they are comparable.
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
    """One transaction as its client knows it; `gid` is set if it is two-phase. A time is NEVER until its event happens.

    `prepared`: all parts are prepared. `decided`: just before the first COMMIT (PREPARED) or ROLLBACK PREPARED is sent.
    `sent`, `last_sent`: just before the first and the last COMMIT (PREPARED) are sent; `acknowledged`: the first is
    answered; these are NEVER after a rollback. `is_tagged`: a coordinator commits the first part in one phase.
    """

    gid: str = ""
    inserts: tuple[Row, ...] = ()
    deletes: tuple[Row, ...] = ()
    shards: tuple[int, ...] = ()
    prepared: float = NEVER
    decided: float = NEVER
    sent: float = NEVER
    acknowledged: float = NEVER
    last_sent: float = NEVER
    is_tagged: bool = False

    def must_be_in(self, taken: TakenIncrement) -> bool:
        """Whether an increment without the transaction has lost it."""
        return self.acknowledged < taken.started

    def may_be_in(self, taken: TakenIncrement) -> bool:
        """Whether an increment may include the transaction."""
        return self.sent <= taken.returned

    def is_held_throughout(self, taken: TakenIncrement) -> bool:
        """Whether the transaction was prepared everywhere and decided nowhere during the whole increment."""
        return self.prepared < taken.started and self.decided > taken.returned

    def is_half_committed_throughout(self, taken: TakenIncrement) -> bool:
        """Whether the transaction was committed on only some shards during the whole increment."""
        return self.acknowledged < taken.started and self.last_sent > taken.returned


@dataclass(frozen=True, slots=True)
class TakenIncrement:
    """One increment: when its command started and returned, and the restored rows."""

    number: int
    started: float
    returned: float
    rows: frozenset[Row] = frozenset()


@dataclass(slots=True)
class _RowHistory:
    """The transactions of the journal that inserted or deleted one row."""

    inserted: Transaction
    deleted: list[Transaction] = field(default_factory=list)


def find_disagreements(journal: Iterable[Transaction], increments: Sequence[TakenIncrement]) -> list[str]:
    """Describe every disagreement between the increments (in order) and the clients' journal."""
    transactions = list(journal)
    histories = {row: _RowHistory(one) for one in transactions for row in one.inserts}
    for one in transactions:
        for row in one.deletes:
            histories[row].deleted.append(one)
    found: list[str] = []
    for taken in increments:
        unknown = sorted(taken.rows - histories.keys(), key=str)
        found += [f"increment {taken.number} has {row}, which nobody wrote" for row in unknown]
        for row, history in histories.items():
            found += _row_disagreements(row, history, taken)
        found += _torn(transactions, taken)
    for earlier, later in itertools.pairwise(increments):
        for row in earlier.rows - later.rows:
            if row in histories and not any(one.may_be_in(later) for one in histories[row].deleted):
                found.append(f"{row} is in increment {earlier.number} and not in {later.number}")
    return [*found, *_reappeared(increments)]


def _row_disagreements(row: Row, history: _RowHistory, taken: TakenIncrement) -> Iterator[str]:
    inserted, where = history.inserted, f"increment {taken.number}"
    name = f"{row} of {inserted.gid or 'a local transaction'}"
    if row in taken.rows:
        if not inserted.may_be_in(taken):
            yield f"{where} has {name}, which was {'committed later' if inserted.sent < NEVER else 'never committed'}"
        if any(one.must_be_in(taken) for one in history.deleted):
            yield f"{where} has {name}, which was deleted before it began"
    elif inserted.must_be_in(taken) and not any(one.may_be_in(taken) for one in history.deleted):
        yield f"lost: {where} lacks {name}, which was committed before it began"


def _torn(transactions: Iterable[Transaction], taken: TakenIncrement) -> Iterator[str]:
    """Find transactions of which the increment contains only a part; rows that may have been deleted don't count."""
    removed: set[Row] = {row for one in transactions if one.may_be_in(taken) for row in one.deletes}
    for one in transactions:
        present = [row in taken.rows for row in one.inserts if row not in removed]
        kept = [row in taken.rows for row in one.deletes if one.inserts == ()]
        if any(present) and not all(present):
            yield f"torn: increment {taken.number} has a part of {one.gid or one.inserts}"
        if one.may_be_in(taken) and any(kept) and not all(kept):
            yield f"torn: increment {taken.number} has a part of what {one.gid} deleted"


def _reappeared(increments: Sequence[TakenIncrement]) -> Iterator[str]:
    removed: dict[Row, int] = {}
    for earlier, later in itertools.pairwise(increments):
        yield from (f"{row} came back in increment {later.number}" for row in later.rows & removed.keys())
        removed |= {row: later.number for row in earlier.rows - later.rows}


@dataclass(frozen=True, slots=True)
class Occurrences:
    """How often the interesting cases occurred, by the journal; a run without them proves nothing.

    `held` transactions were open during two or more increments; `rolled_back` of these were rolled back. `half`
    transactions were committed on only one shard during two or more increments; `early` counts all pairs of such a
    transaction and such an increment. `trims` deleted links. `tagged` transactions had a coordinator that committed its
    part in one phase.
    """

    transactions: int
    links: int
    trims: int
    tagged: int
    held: int
    rolled_back: int
    half: int
    early: int


def count_occurrences(journal: Iterable[Transaction], increments: Sequence[TakenIncrement]) -> Occurrences:
    """Count the occurrences by the clients' times alone."""
    spans: dict[str, dict[Transaction, int]] = defaultdict(lambda: defaultdict(int))
    transactions = list(journal)
    for one in transactions:
        for taken in increments:
            spans["held"][one] += one.is_held_throughout(taken)
            spans["half"][one] += one.is_half_committed_throughout(taken)
    held = [one for one, count in spans["held"].items() if count >= 2]
    return Occurrences(
        transactions=sum(one.acknowledged < NEVER for one in transactions),
        links=sum(one.acknowledged < NEVER and any(row[0] == "child" for row in one.inserts) for one in transactions),
        trims=sum(one.acknowledged < NEVER and bool(one.deletes) for one in transactions),
        tagged=sum(one.acknowledged < NEVER and one.is_tagged for one in transactions),
        held=len(held),
        rolled_back=sum(one.decided < NEVER and one.sent == NEVER for one in held),
        half=sum(count >= 2 for count in spans["half"].values()),
        early=sum(spans["half"].values()),
    )

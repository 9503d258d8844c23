"""Strategies for whole cases."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from hypothesis import strategies as st

from tests.fuzz.alterations import Alterer
from tests.fuzz.during import AFTER, BEFORE
from tests.fuzz.maker import Maker
from tests.fuzz.names import ODD, is_name_in
from tests.fuzz.schemas import make_schema
from tests.fuzz.script import Case, Fate, Statement, Transaction
from tests.fuzz.tables import SHARDS
from tests.fuzz.workloads import Writer, draw_transaction

INCREMENTS = (1, 3)
TRANSACTIONS = (8, 16)
# Where schemas change, about one transaction in this many changes them.
ALTERING = 3
ALTERING_FATES = (*[Fate.COMMIT] * 5, Fate.COMMIT_PREPARED, Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED)
REWRITES = ("VACUUM FULL", "CLUSTER", "VACUUM FREEZE", "ANALYZE", "REINDEX DATABASE", "CHECKPOINT")
# Transactions run during one create in this many, at points before its cut and after.
MEANWHILE = 2
LISTS = ("tables", "families", "domains", "sequences", "objects", "schemas")
ENCODINGS = (*["UTF8"] * 6, "LATIN1", "SQL_ASCII")
# Settings of a database that must not change a snapshot.
SETTINGS = (
    "datestyle = 'SQL, DMY'", "datestyle = 'German'", "intervalstyle = 'sql_standard'", "intervalstyle = 'iso_8601'",
    "timezone = 'Pacific/Chatham'", "bytea_output = 'escape'", "extra_float_digits = -15", "xmlbinary = 'hex'",
    "search_path = 'Odd \"S\"'", "default_transaction_isolation = 'serializable'", "jit = off",
    "row_security = off", "quote_all_identifiers = on", "default_transaction_deferrable = on",
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A database, the transactions on it, and how it is judged; in most, schemas change between the increments."""
    encoding = draw(st.sampled_from(ENCODINGS))
    alters = draw(st.integers(0, 3)) > 0
    maker = Maker(draw, [word for word in ODD if is_name_in(word, encoding)])
    make_schema(maker)
    setup = tuple(maker.statements)
    intervals = [(*(draw_transaction(draw, maker) for _ in range(draw(st.integers(*TRANSACTIONS)))),
                  *draw_meanwhile(draw, maker, alters=alters))]  # fmt: skip
    for _ in range(draw(st.integers(*INCREMENTS))):
        found: list[Transaction] = []
        for _ in range(draw(st.integers(*TRANSACTIONS))):
            kind = draw(st.integers(0, 9))
            if alters and kind % ALTERING == 1:
                found.append(draw_altering(draw, maker))
            elif kind == 9:
                part = (Statement(draw(st.sampled_from(REWRITES))),)
                found.append(Transaction(Fate.BARE, ((draw(st.sampled_from(SHARDS)), part),)))
            else:
                found.append(draw_transaction(draw, maker))
        intervals.append((*found, *draw_meanwhile(draw, maker, alters=alters)))
    options = {
        "encoding": encoding,
        "judge": draw(st.sampled_from(["last", "last", "all"])),
        "check": draw(st.sampled_from(["no", "no", "yes"])),
        "sizes": draw(st.sampled_from(["usual", "usual", "small"])),
        "origin": draw(st.sampled_from(["no", "no", "no", "yes"])),
    }
    for setting in draw(st.lists(st.sampled_from(SETTINGS), max_size=2)):
        name, _, value = setting.partition(" = ")
        options[f"set {name}"] = value
    return Case(setup, tuple(intervals), options)


def draw_meanwhile(draw: st.DrawFn, maker: Maker, *, alters: bool) -> Iterator[Transaction]:
    """Transactions at points of the next create."""
    if draw(st.integers(1, MEANWHILE)) < MEANWHILE:
        return
    for points in (BEFORE, AFTER):
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.sampled_from(points))
            is_altering = alters and draw(st.integers(0, 3)) == 3
            yield draw_altering(draw, maker, at) if is_altering else draw_transaction(draw, maker, at)


def draw_altering(draw: st.DrawFn, maker: Maker, at: str = "") -> Transaction:
    """A transaction that alters the schema, with rows written before, between and after."""
    fate, before = draw(st.sampled_from(ALTERING_FATES)), copy_maker(maker)
    parts: dict[int, list[Statement]] = {shard: [] for shard in SHARDS}
    for _ in range(draw(st.integers(1, 3))):
        write(draw, maker, parts)
        maker.statements.clear()
        kept, is_undone = copy_maker(maker), maker.one_in(10)
        Alterer(maker).alter()
        for shard in SHARDS:
            texts = [text for shards, text in maker.statements if shard in shards]
            if texts:
                parts[shard].append(Statement(";\n".join(texts), is_undone=is_undone))
        if is_undone:
            restore(maker, kept)
    write(draw, maker, parts)
    if fate in (Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED):
        restore(maker, before)
    found = tuple((shard, tuple(statements)) for shard, statements in parts.items() if statements)
    return Transaction(fate, found, draw(st.integers(0, 2)) == 0, at)


def write(draw: st.DrawFn, maker: Maker, parts: dict[int, list[Statement]]) -> None:
    """Sometimes add a statement on the current tables."""
    is_writing = draw(st.booleans())
    if maker.tables and is_writing:
        shard, writer = draw(st.sampled_from(SHARDS)), Writer(draw, maker.tables, maker.sequences)
        parts[shard].append(Statement(writer.statement(shard)))


def copy_maker(maker: Maker) -> Maker:
    """A copy of the maker's state."""
    kept = copy(maker)
    kept.labels = {name: [*labels] for name, labels in maker.labels.items()}
    kept.composed = dict(maker.composed)
    for name in LISTS:
        setattr(kept, name, [*getattr(maker, name)])
    return kept


def restore(maker: Maker, kept: Maker) -> None:
    """Reset the maker to a copy, except that names that were used stay used."""
    for name in ("labels", "composed", *LISTS):
        setattr(maker, name, getattr(kept, name))

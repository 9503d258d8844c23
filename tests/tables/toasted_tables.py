"""Tables of large values, stored in every way, and many increments of updates that leave most of them unchanged."""

from __future__ import annotations

import random

TOAST_INCREMENTS = 10
ROWS = 12
SCHEMA = (
    "CREATE SCHEMA toast",
    "CREATE TABLE toast.t (id int PRIMARY KEY, n int DEFAULT 0, outside text, squeezed text, main text, mixed text)",
    "ALTER TABLE toast.t ALTER outside SET STORAGE EXTERNAL, ALTER squeezed SET STORAGE EXTENDED,"
    " ALTER main SET STORAGE MAIN, ALTER squeezed SET COMPRESSION pglz",
    "CREATE TABLE toast.keyed (v text, key text PRIMARY KEY, n int DEFAULT 0)",
    "ALTER TABLE toast.keyed ALTER v SET STORAGE EXTERNAL, ALTER key SET STORAGE EXTERNAL",
    "CREATE TABLE toast.bag (n int, v text)",
    "ALTER TABLE toast.bag REPLICA IDENTITY FULL",
    "ALTER TABLE toast.bag ALTER v SET STORAGE EXTERNAL",
    "CREATE TABLE toast.never (id int PRIMARY KEY, n int DEFAULT 0, v text)",
    "ALTER TABLE toast.never ALTER v SET STORAGE EXTERNAL",
)


def large(seed: int, kind: str = "outside") -> str:
    """SQL for a text that is stored out of line; a squeezed one is repetitive."""
    if kind == "squeezed":
        return f"(SELECT repeat(md5('{seed}') || E'\\t\\\\', 3000))"
    return f"(SELECT string_agg(md5((g * {seed})::text), E'\\n') FROM generate_series(1, {120 + seed % 9}) g)"


def toast_statements(increment: int) -> list[str]:
    """The statements before an increment; 0 creates and fills the tables."""
    chance = random.Random(increment)
    if increment == 0:
        return [*SCHEMA, *(statement for row in range(1, ROWS + 1) for statement in row_inserts(row))]
    statements = [f"UPDATE toast.never SET n = {increment} WHERE id % 3 = {increment % 3}"]
    for _ in range(12):
        row, other, seed = chance.randint(1, ROWS), chance.randint(1, ROWS), chance.randrange(1, 999)
        kind = chance.choice(["outside", "squeezed", "main", "mixed"])
        statements += chance.choice(
            [
                [f"UPDATE toast.t SET n = n + 1 WHERE id = {row}"],
                [f"UPDATE toast.t SET {kind} = {large(seed, kind)} WHERE id = {row}"],
                [f"UPDATE toast.t SET {kind} = NULL WHERE id = {row}"],
                # Move a row away and back; swap the keys of two rows.
                [f"UPDATE toast.t SET id = -id, n = {seed} WHERE id = {row}",
                 f"UPDATE toast.t SET id = -id WHERE id = {-row}"],
                [f"BEGIN; UPDATE toast.t SET id = 0 WHERE id = {row}; UPDATE toast.t SET id = {row} WHERE id = {other}"
                 f" AND {row} <> {other}; UPDATE toast.t SET id = {other} WHERE id = 0; COMMIT"],
                [f"UPDATE toast.t SET {kind} = (SELECT {kind} FROM toast.t WHERE id = {other}) WHERE id = {row}"],
                [f"DELETE FROM toast.t WHERE id = {row}", *row_inserts(row)[:1]],
                [f"UPDATE toast.keyed SET n = n + 1 WHERE key LIKE '{row} %'"],
                [f"UPDATE toast.keyed SET key = key || 'x' WHERE key LIKE '{row} %'"],
                [f"UPDATE toast.keyed SET v = {large(seed)} WHERE key LIKE '{row} %'"],
                [f"UPDATE toast.bag SET n = n + 1 WHERE n % 4 = {row % 4}"],
                [f"BEGIN; UPDATE toast.t SET n = {seed} WHERE id = {row}; SAVEPOINT s; DELETE FROM toast.t;"
                 f" ROLLBACK TO s; PREPARE TRANSACTION 'toast'", "COMMIT PREPARED 'toast'"],
                [f"BEGIN; UPDATE toast.t SET {kind} = {large(seed, kind)} WHERE id = {row};"
                 " PREPARE TRANSACTION 'toast'",
                 "ROLLBACK PREPARED 'toast'"],
            ]
        )  # fmt: skip
    return statements


def row_inserts(row: int) -> list[str]:
    """Statements that insert a row into every table."""
    texts = ", ".join(
        large(row * 10 + place, kind) for place, kind in enumerate(("outside", "squeezed", "main", "mixed"))
    )
    return [
        f"INSERT INTO toast.t VALUES ({row}, 0, {texts})",
        f"INSERT INTO toast.keyed VALUES ({large(row)}, '{row} ' || left({large(row + 50)}, 2400))",
        f"INSERT INTO toast.bag VALUES ({row}, {large(row % 3 + 1)})",
        f"INSERT INTO toast.never VALUES ({row}, 0, {large(row + 100)})",
    ]

"""Changes of tables and publications between two increments, and what each means for the table's stored rows."""

from __future__ import annotations

ADD, DROP = "ALTER PUBLICATION {ours} ADD TABLE ONLY kept.{t}", "ALTER PUBLICATION {ours} DROP TABLE kept.{t}"
TAKEN_OUT = "it was taken out of Cutline's publication"
OTHER_FORM = "it was rewritten, or rows were written while its columns or labels of its types were different"
# By table (LIKE_PERSON creates all but "more"): the statements before each of two increments, and why the increment
# copies the table again. "": its definition changes without a copy; None: the increment lists no definition of it.
Step = tuple[list[str], str | None]
SAME: Step = ([], None)
CHANGES: dict[str, tuple[Step, Step]] = {
    "more": (
        (["CREATE TABLE kept.more (id int PRIMARY KEY)", "INSERT INTO kept.more VALUES (1)"], "it is new"),
        (["CREATE TABLE kept.other (LIKE kept.more INCLUDING ALL)", "DROP TABLE kept.more",
          "ALTER TABLE kept.other RENAME TO more"], "it is new"),
    ),
    "identified": (
        (["ALTER TABLE kept.{t} REPLICA IDENTITY FULL"], "its replica identity changed"),
        (["ALTER TABLE kept.{t} REPLICA IDENTITY DEFAULT", "UPDATE kept.{t} SET age = 1 WHERE id = 2"],
         "its replica identity changed"),
    ),
    "rewritten": (
        (["ALTER TABLE kept.{t} ALTER paid TYPE kept.amount_{t} USING paid * 100"], "it was rewritten"),
        SAME,
    ),
    "moving": (
        (["ALTER TABLE kept.{t} RENAME TO moved", "UPDATE kept.moved SET age = 1 WHERE id = 1"], ""),
        (["DROP TABLE kept.moved"], None),
    ),
    "taken_out": (([DROP], TAKEN_OUT), ([DROP, "UPDATE kept.{t} SET age = 1", ADD], TAKEN_OUT)),
    "unlogged": (
        ([DROP, "ALTER TABLE kept.{t} SET UNLOGGED", "UPDATE kept.{t} SET age = 2", "ALTER TABLE kept.{t} SET LOGGED",
          ADD], TAKEN_OUT),
        SAME,
    ),
    "renamed": (
        (["ALTER TABLE kept.{t} RENAME TO somebody", "UPDATE kept.somebody SET age = 4 WHERE id = 1",
          "ALTER TABLE kept.somebody RENAME TO {t}"], OTHER_FORM),
        SAME,
    ),
    "labelled": ((["ALTER TYPE kept.mood_{t} RENAME VALUE 'sad' TO 'blue'"],
                  "a column's type now prints values differently"), SAME),
    "added": (
        (["ALTER TABLE kept.{t} ADD more int DEFAULT 7", "UPDATE kept.{t} SET more = 8 WHERE id = 3"], ""),
        (["ALTER TABLE kept.{t} DROP age"], ""),
    ),
    "nullable": ((["ALTER TABLE kept.{t} ALTER name DROP NOT NULL", "UPDATE kept.{t} SET name = NULL WHERE id = 4"],
                  None), SAME),
    "unchecked": ((["ALTER TABLE kept.{t} DROP CONSTRAINT {t}_age_check", "UPDATE kept.{t} SET age = 300 WHERE id = 5"],
                   None), SAME),
    "calm": ((["ALTER TYPE kept.mood_{t} ADD VALUE 'calm'", "UPDATE kept.{t} SET mood = 'calm' WHERE id = 6"], None),
             SAME),
    "relabelled": (
        (["ALTER TYPE kept.mood_{t} ADD VALUE 'calm'", "UPDATE kept.{t} SET mood = 'calm' WHERE id = 6",
          "ALTER TYPE kept.mood_{t} RENAME VALUE 'calm' TO 'quiet'"], OTHER_FORM),
        SAME,
    ),
    "masked": (
        (["CREATE DOMAIN kept.mask_{t} AS kept.mood_{t}", "ALTER TABLE kept.{t} ADD mask kept.mask_{t}",
          "ALTER TYPE kept.mood_{t} ADD VALUE 'calm'", "UPDATE kept.{t} SET mask = 'calm' WHERE id = 6",
          "ALTER TYPE kept.mood_{t} RENAME VALUE 'calm' TO 'quiet'"], OTHER_FORM),
        SAME,
    ),
    "stated": (
        (["CREATE TYPE kept.state_{t} AS ENUM ('open', 'shut')", "ALTER TABLE kept.{t} ADD state kept.state_{t}",
          "UPDATE kept.{t} SET state = 'open' WHERE id = 6"], ""),
        (["UPDATE kept.{t} SET state = 'shut' WHERE id = 6"], None),
    ),
    "restated": (
        (["CREATE TYPE kept.state_{t} AS ENUM ('open')", "ALTER TABLE kept.{t} ADD state kept.state_{t}",
          "UPDATE kept.{t} SET state = 'open' WHERE id = 6",
          "ALTER TYPE kept.state_{t} RENAME VALUE 'open' TO 'closed'"], OTHER_FORM),
        SAME,
    ),
    "listed": (
        (["CREATE TYPE kept.state_{t} AS ENUM ('open')", "ALTER TABLE kept.{t} ADD states kept.state_{t}[]",
          "UPDATE kept.{t} SET states = '{{open}}' WHERE id = 6",
          "ALTER TYPE kept.state_{t} RENAME VALUE 'open' TO 'closed'"], OTHER_FORM),
        SAME,
    ),
    "paired": (
        (["CREATE TYPE kept.pair_{t} AS (a int)", "ALTER TABLE kept.{t} ADD pair kept.pair_{t}",
          "UPDATE kept.{t} SET pair = ROW(1) WHERE id = 6", "ALTER TYPE kept.pair_{t} ADD ATTRIBUTE b int"],
         OTHER_FORM),
        SAME,
    ),
    "referring": (
        (["CREATE VIEW kept.seen_{t} AS SELECT 1", "ALTER TABLE kept.{t} ADD of_view regclass",
          "UPDATE kept.{t} SET of_view = 'kept.seen_{t}' WHERE id = 6",
          "ALTER VIEW kept.seen_{t} RENAME TO watched_{t}"], OTHER_FORM),
        (["ALTER TABLE kept.{t} DROP of_view"], "a column's type now prints values differently"),
    ),
    "paid": (
        (["ALTER DOMAIN kept.amount_{t} DROP CONSTRAINT amount_{t}_check",
          "UPDATE kept.{t} SET paid = -1 WHERE id = 7"], None),
        SAME,
    ),
    "indexed": ((["CREATE UNIQUE INDEX one_age ON kept.{t} (id, age)"], None), SAME),
}  # fmt: skip
# Tables that are renamed.
RENAMED = {"moving": "moved"}
SET_TABLES = "ALTER PUBLICATION {ours} SET TABLE "
LIKE_PERSON = (
    "CREATE TYPE kept.mood_{t} AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN kept.amount_{t} AS integer CONSTRAINT amount_{t}_check CHECK (value >= 0)",
    "CREATE TABLE kept.{t} (id int PRIMARY KEY, name text NOT NULL, mood kept.mood_{t},"
    " age int CHECK (age < 200), paid kept.amount_{t})",
    "INSERT INTO kept.{t} SELECT n, 'one', 'glad', n, n FROM generate_series(1, 50) n",
)

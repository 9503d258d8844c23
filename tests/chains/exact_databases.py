"""The databases of the exact chain: their initial content, and their changes before each increment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import psycopg

from tests.run.soak import SOAK_SECONDS
from tests.servers.installed import has
from tests.tables import odd_tables, shaped_tables
from tests.tables.consequence_cases import CONSEQUENCE_CASES
from tests.tables.odd_table_cases import ODD_TABLE_CASES
from tests.tables.odd_tables import WideHistory, statements
from tests.tables.own_functions import own_functions
from tests.tables.schema_cases import COLUMN_CASES
from tests.tables.statement_cases import STATEMENT_CASES
from tests.tables.table_cases import TABLE_CASES
from tests.tables.toasted_tables import SCHEMA as TOAST_SCHEMA
from tests.tables.toasted_tables import TOAST_INCREMENTS, toast_statements
from tests.tables.typed_tables import Typed, changes_of, create_typed, run
from tests.tables.values_of_types import RENAMES

CASES = STATEMENT_CASES | CONSEQUENCE_CASES
SCHEMA_CASES = COLUMN_CASES | TABLE_CASES | ODD_TABLE_CASES
# A schema that a session finds only by the search_path of its database.
FUNCTIONS = '"Né\nw"'
SEED = 20261120
RANDOM_TRANSACTIONS = 150
# The steps of the TOAST tables' history that run before each increment.
TOAST_STEPS = {0: [0], 1: [1], 2: [2], 3: [3, 4, 5], 4: [*range(6, TOAST_INCREMENTS + 1)]}
# XML within other types, for a server that supports it.
XML_WITHIN = (
    "CREATE DOMAIN own.paper AS xml", "CREATE DOMAIN own.thin AS own.paper", "CREATE TYPE own.page AS (n int, x xml[])",
    "CREATE DOMAIN own.pages AS own.page[]",
    "CREATE TABLE own.papers (id int PRIMARY KEY, gone xml, a own.thin, n int, b own.pages, c own.paper[], d xml)",
    "ALTER TABLE own.papers DROP gone",
    "INSERT INTO own.papers VALUES (1, '<a>&amp;</a>', 2,"
    """ ARRAY[(3, '{<b/>,"<c d=\\"e\\"/>"}')::own.page], '{<f/>}', '<g/>')""",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """The chain's rules for groups, and the tables whose rows are in no snapshot."""

    text: str
    not_copied: frozenset[str]


RULES = Rules(
    '[groups]\nexclude = ["public.left_out"]\nappend_only = ["public.log"]\n',
    frozenset({"public.left_out", "public.unlogged"}),
)


def execute(dsn: str, script: Iterable[str], *, schema: str | None = None) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        if schema:
            connection.execute(f"SET search_path = {schema}".encode())
        for statement in script:
            connection.execute(statement.encode())


def change_typed(dsn: str, typed: list[Typed], increment: int) -> None:
    """Change the table of every type before the first two increments, and the types themselves before the third."""
    if increment in (1, 2):
        with psycopg.connect(dsn, autocommit=True, options="-c search_path=pg_catalog,ext") as connection:
            for table in typed:
                run(connection, changes_of(table, increment))
    if increment == 3:
        execute(dsn, RENAMES)


@dataclass(slots=True)
class ExactDatabase:
    """The database with every type, statement and shape of table."""

    dsn: str
    typed: list[Typed] = field(default_factory=list)
    wide: WideHistory = field(default_factory=lambda: WideHistory(SEED))

    def fill(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            self.typed = create_typed(connection)
        execute(self.dsn, toast_statements(0))
        self.fill_untyped()

    def fill_untyped(self) -> None:
        """Create and fill all tables except those of types and of large values."""
        for step in shaped_tables.steps():
            execute(self.dsn, step[0])
        for name, case in CASES.items():
            execute(self.dsn, [f"CREATE SCHEMA {name}"])
            execute(self.dsn, statements(case.first), schema=name)
        execute(self.dsn, statements(odd_tables.SCHEMA))
        execute(self.dsn, statements(odd_tables.FIRST_ROWS))
        execute(self.dsn, own_functions("public", 0))

    def change(self, increment: int) -> None:
        for step in TOAST_STEPS[increment]:
            execute(self.dsn, toast_statements(step))
        change_typed(self.dsn, self.typed, increment)
        self.change_untyped(increment)

    def change_untyped(self, increment: int) -> None:
        """Change all tables except those of types and of large values."""
        if increment <= len(odd_tables.INCREMENTS):
            execute(self.dsn, self.wide.statements(RANDOM_TRANSACTIONS, increment - 1))
            execute(self.dsn, statements(odd_tables.INCREMENTS[increment - 1]))
        if increment > 2:
            return
        for step in shaped_tables.steps():
            execute(self.dsn, step[increment])
        for name, case in CASES.items():
            execute(self.dsn, statements(case.increments[increment - 1]), schema=name)
        with psycopg.connect(self.dsn) as connection, connection.cursor().copy("COPY merges.t FROM STDIN") as copy:
            copy.write(f"{increment * 7000}\tcopied {increment} \\\\N\t\\N\n".encode())
        execute(self.dsn, own_functions("public", increment))


@dataclass(slots=True)
class OtherVersionDatabase:
    """A database of another version: every type and compressed values, in the long form everything else, too."""

    dsn: str
    untyped: ExactDatabase
    typed: list[Typed] = field(default_factory=list)
    has: set[str] = field(default_factory=set)

    def fill(self) -> None:
        """Create a table for every type, and large values."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            self.has = {feature for feature in ("xml", "lz4") if has(connection, feature)}
            self.typed = create_typed(connection)
        first = toast_statements(0)
        if "lz4" in self.has:
            first.insert(len(TOAST_SCHEMA), "ALTER TABLE toast.t ALTER squeezed SET COMPRESSION lz4")
        execute(self.dsn, (*first, *XML_WITHIN * ("xml" in self.has)))
        if SOAK_SECONDS:
            self.untyped.fill_untyped()

    def change(self, increment: int) -> None:
        for step in TOAST_STEPS[increment]:
            execute(self.dsn, toast_statements(step))
        change_typed(self.dsn, self.typed, increment)
        if increment == 2 and "xml" in self.has:
            execute(self.dsn, ["ALTER TABLE own.papers ADD e own.paper"])
        if SOAK_SECONDS:
            self.untyped.change_untyped(increment)

    def compressions(self, dsn: str) -> list[str]:
        """Return the compression methods of the repetitive values."""
        query = "SELECT DISTINCT pg_column_compression(squeezed) FROM toast.t WHERE squeezed IS NOT NULL"
        with psycopg.connect(dsn) as connection:
            return [row[0] for row in connection.execute(query)]


def run_schema_cases(dsn: str, increment: int, *, is_aftermath: bool = False) -> None:
    """Run every schema case's script for an increment, in the case's schema: 0 creates it, 1 to 3 change it.

    Also run the statements of `own_functions`, whose functions are found only by the database's search_path.
    """
    if not is_aftermath:
        execute(dsn, own_functions(FUNCTIONS, increment))
    if increment == 0:
        with psycopg.connect(dsn) as connection:
            database = connection.info.dbname
        execute(dsn, [f'ALTER DATABASE {database} SET search_path = "$user", {FUNCTIONS}, public'])
    for name, case in SCHEMA_CASES.items():
        if increment == 0:
            execute(dsn, [f"CREATE SCHEMA {name}"])
        scripts = (case.first, *case.increments, "")
        with psycopg.connect(dsn, autocommit=True, options=f"-c search_path={name}") as connection:
            for statement in statements(case.aftermath if is_aftermath else scripts[increment]):
                connection.execute(statement.encode())

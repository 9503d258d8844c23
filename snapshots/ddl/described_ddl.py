"""Describe what a stored DDL archive says about the parts of a database that a commit describes, too.

No server is needed. pg_dump writes one entry for each object. It quotes all identifiers, and writes the columns of a
table in the order of their numbers (pg_dump.c, dumpTableSchema). Names are as the DDL has them, with escapes for bytes
that are not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from msgspec import Struct, field

from cutline.nodes.baseline import BUILTIN, ICU, LIBC
from cutline.snapshots.ddl.ddl_archive import (
    CONSTRAINT,
    EXTENSION,
    PRIVILEGES,
    SEQUENCE,
    TABLE,
    ArchiveEntry,
    Contents,
    DdlArchive,
    statements_of_entry,
)
from cutline.snapshots.ddl.impossible_entries import impossible_entries
from cutline.snapshots.ddl.quoted_names import Name, shown
from cutline.snapshots.ddl.statement_lists import KIND, STRING, split_list, without_table_name
from cutline.snapshots.records.commit import NO_LIMIT

# A semicolon in quotes does not end a statement.
END = re.compile(rf"{STRING}|(?P<mark>;)")
NAME = re.compile(r'"((?:[^"]|"")*)"')
LITERAL = re.compile(r"'((?:[^']|'')*)'")
# What follows the type of a column. Types contain these words only in lowercase, or quoted.
AFTER_TYPE = re.compile(rf"{STRING}|\s(?P<word>COLLATE|CONSTRAINT|DEFAULT|GENERATED|NOT NULL|WITH OPTIONS)\b")
# The same where the words end a default: inside parentheses, NOT NULL belongs to an expression.
AFTER_DEFAULT = re.compile(rf"{STRING}|(?P<mark>[()])|\s(?P<word>COLLATE|CONSTRAINT|NOT NULL)\b")
NAMES_IN_PARENTHESES = r"\(((?:\"[^\"]*\"|[^()\"])*)\)"
KEY = re.compile(rf"\sPRIMARY KEY {NAMES_IN_PARENTHESES}")
# From 18 on, pg_dump writes such a constraint apart from the column.
UNPROVED = re.compile(rf"\sADD CONSTRAINT {NAME.pattern} NOT NULL {NAME.pattern}(?: NO INHERIT)? NOT VALID;")
PARENTS = re.compile(rf"\sINHERITS {NAMES_IN_PARENTHESES}")
OF_TYPE = re.compile(rf"\sOF ({NAME.pattern})\.({NAME.pattern})")
FULL_IDENTITY = re.compile(rf"{STRING}|(?P<is_full>\sREPLICA IDENTITY FULL;)")
INDEX_IDENTITY = re.compile(rf"ALTER TABLE ONLY ({NAME.pattern})\.({NAME.pattern}) REPLICA IDENTITY USING INDEX")
# The columns of an index follow the name of its method; those of a constraint follow its kind.
INDEX_COLUMNS = re.compile(r"\sUSING \"[^\"]*\" \(|\sUNIQUE(?: NULLS NOT DISTINCT)? \(|\sPRIMARY KEY \(")
ENUM = re.compile(r"\sAS ENUM \(")
COMPOSITE = re.compile(r"\sAS \(")
DOMAIN_OVER = re.compile(rf"^CREATE DOMAIN {NAME.pattern}\.{NAME.pattern} AS ")
NEXT_VALUE = re.compile(r"^\"?nextval\"?\('((?:[^']|'')+)'::")
INCREMENT = re.compile(r"\bINCREMENT BY (-?\d+)")
SMALLEST, LARGEST = (re.compile(rf"(?<!NO )\b{word}VALUE (-?\d+)") for word in ("MIN", "MAX"))
CYCLES = re.compile(r"(?<!NO )\bCYCLE\b")
SEQUENCE_TYPE = re.compile(r"\bAS (smallint|integer|bigint)\b")
IDENTITY_SEQUENCE = re.compile(r"^ALTER TABLE .* ADD GENERATED ", re.DOTALL)
BITS: Mapping[str, int] = {"smallint": 15, "integer": 31, "bigint": 63}
OPTION = re.compile(r"\s([A-Z_]+) = (?:'((?:[^']|'')*)'|([^\s;']+))")
PROVIDERS: Mapping[str, str] = {"libc": LIBC, "icu": ICU, "builtin": BUILTIN}
SETTING = re.compile(
    rf"ALTER (?:ROLE ({NAME.pattern}) IN )?DATABASE {NAME.pattern} SET ({NAME.pattern})"
    rf" TO ({LITERAL.pattern}(?:, {LITERAL.pattern})*);"
)
TYPE, DOMAIN, DEFAULT, INDEX, COMMENT = "TYPE", "DOMAIN", "DEFAULT", "INDEX", "COMMENT"
POLICY, COLLATION = "POLICY", "COLLATION"
DATABASE, DATABASE_PROPERTIES = "DATABASE", "DATABASE PROPERTIES"
CONNECTION_LIMIT, IS_TEMPLATE = re.compile(r" CONNECTION LIMIT = (-?\d+);"), re.compile(r" IS_TEMPLATE = true;")
DATABASE_COMMENT = re.compile(rf"COMMENT ON DATABASE {NAME.pattern} IS '((?:[^']|'')*)';\s*\Z")
GRANT = re.compile(
    rf"(?P<verb>GRANT|REVOKE) (?P<what>[A-Z,]+) ON DATABASE {NAME.pattern} (?:TO|FROM)"
    rf" (?:PUBLIC|(?P<grantee>{NAME.pattern}))(?P<option> WITH GRANT OPTION)?;"
)
POLICY_TO = re.compile(
    rf"\s*CREATE POLICY {NAME.pattern} ON {NAME.pattern}\.{NAME.pattern}(?: AS [A-Z]+)?(?: FOR [A-Z]+)?"
    rf" TO (?P<roles>{NAME.pattern}(?:, {NAME.pattern})*)"
)
# A statement of an object's privileges after its names were replaced by numbers.
GRANTED_TO = re.compile(r'^GRANT [^;]* TO "(\d+)"(?: WITH GRANT OPTION)?;$', re.MULTILINE)
SESSION = re.compile(rf"(?:SET SESSION AUTHORIZATION {NAME.pattern}|RESET SESSION AUTHORIZATION);")
PRIVILEGES_ON_DATABASE = ("CONNECT", "CREATE", "TEMPORARY")
# By default, the owner has all privileges on a database, and PUBLIC has these (PostgreSQL manual, "Privileges").
DEFAULT_TO_PUBLIC = ("CONNECT", "TEMPORARY")
PLAIN_NAME = re.compile(r"[^.()\[\]\"]+")
SERVER_VERSION = re.compile(r"(\d+)(?:\.(\d+))?")
# Objects with lower oids come with the server.
FIRST_OWN_OID = 16384
# The objects that are compared between shards: those with owners, the parts of tables, and privileges and comments.
# Publications, foreign servers and user mappings are usually not the same.
OWNED = frozenset(
    {
        "SCHEMA",
        "TABLE",
        "FOREIGN TABLE",
        "SEQUENCE",
        "TYPE",
        "DOMAIN",
        "FUNCTION",
        "PROCEDURE",
        "AGGREGATE",
        "VIEW",
        "MATERIALIZED VIEW",
        "EVENT TRIGGER",
    }
)
REMARKS = frozenset({PRIVILEGES, "COMMENT", "SECURITY LABEL"})
COMPARED = OWNED.union(
    REMARKS,
    {
        "EXTENSION",
        "TABLE ATTACH",
        "INDEX ATTACH",
        "SEQUENCE OWNED BY",
        "DEFAULT",
        "INDEX",
        "STATISTICS",
        "CONSTRAINT",
        "CHECK CONSTRAINT",
        "FK CONSTRAINT",
        "TRIGGER",
        "RULE",
        "POLICY",
        "ROW SECURITY",
        "DEFAULT ACL",
    },
)
OWNER, OF_OWNER = "owner", "the owner of "

ColumnName = tuple[str, str, str]


class DescribedColumn(Struct, frozen=True):
    """A stored column; `type` is as format_type prints it, without quotes. `default` is None if it has none."""

    name: str
    type: str
    is_not_null: bool = False
    default: str | None = None


class DescribedTable(Struct, frozen=True):
    """An ordinary table: its stored columns, as far as its own statement lists them.

    A table with `parents`, or of the composite type `of_type`, has further columns, and perhaps in another order.
    `generated` are the columns that its statement generates.
    """

    columns: tuple[DescribedColumn, ...]
    generated: frozenset[str] = frozenset()
    parents: tuple[Name, ...] = ()
    of_type: Name | None = None
    is_ordered: bool = True
    has_full_identity: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the statement lists all columns."""
        return not self.parents and self.of_type is None


class DescribedSequence(Struct, frozen=True):
    """A sequence's definition. The limits of its values are None if its type is not known."""

    increment: int
    cycles: bool
    smallest: int | None
    largest: int | None


class DescribedDatabase(Struct, frozen=True):
    """The database of a dump: its name, oid, encoding and locale, as NodeIdentity has them.

    `settings` maps (role, setting) to the elements of its value; the role "" stands for all roles. `privileges` maps
    (grantee, privilege) to whether it may be granted on; the grantee "" is PUBLIC. It is None if it can't be read.
    """

    name: str
    oid: int
    encoding: str
    collate: str
    ctype: str
    locale_provider: str
    locale: str | None
    icu_rules: str | None
    settings: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    owner: str = ""
    comment: str | None = None
    connection_limit: int = NO_LIMIT
    is_template: bool = False
    privileges: Mapping[tuple[str, str], bool] | None = None


class Description(Struct, frozen=True):
    """The permanent tables and sequences in a shard's DDL, keyed by schema and name, and what else a commit describes.

    `keys` are the columns of primary keys, and `identities` those of indexes that are a replica identity. `fed` maps a
    sequence to the columns that get their values from it. `enums` maps the oid of an enum type to its labels, in raw
    text (nodes.encodings), and `fields` maps that of a composite type to the types of its fields, and `bases` that of a
    domain to its type, as format_type prints them, without quotes. `owners` are the roles that own objects.
    `extensions` are those that the DDL creates. `digests` maps the kind of an object, and its label, to a hash of its
    statements, which is the same only in this process; the kind OWNER stands for the owner of an object. `impossible`
    lists which entries pg_dump can't have written, in words. `writer` is pg_dump's major version. `types` maps types
    and domains with plain names, as `schema.name`, to their oids. `server` is the version of the server that was
    dumped: major, and minor if it has a number. `unlogged` are the unlogged tables, which `tables` leaves out.
    `grantees` are the roles that have privileges on objects of the database, or to which a policy applies. `collations`
    are those that the DDL creates. `unproved` are the names of columns that NOT NULL constraints that are NOT VALID are
    on, in whichever table: partitions inherit such constraints without a statement.
    """

    tables: Mapping[Name, DescribedTable] = field(default_factory=dict)
    oids: Mapping[Name, int] = field(default_factory=dict)
    keys: Mapping[Name, frozenset[str]] = field(default_factory=dict)
    identities: Mapping[Name, frozenset[str]] = field(default_factory=dict)
    defaults: Mapping[ColumnName, str] = field(default_factory=dict)
    sequences: Mapping[Name, DescribedSequence] = field(default_factory=dict)
    fed: Mapping[Name, tuple[ColumnName, ...]] = field(default_factory=dict)
    enums: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    composites: Mapping[Name, tuple[str, ...]] = field(default_factory=dict)
    database: DescribedDatabase | None = None
    owners: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    digests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    impossible: tuple[str, ...] = ()
    writer: int = 0
    types: Mapping[str, int] = field(default_factory=dict)
    server: tuple[int, ...] = ()
    fields: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    bases: Mapping[int, str] = field(default_factory=dict)
    unlogged: frozenset[Name] = frozenset()
    grantees: frozenset[str] = frozenset()
    collations: frozenset[Name] = frozenset()
    unproved: frozenset[str] = frozenset()

    def stored_columns(self, name: Name) -> frozenset[str] | None:
        """Return the names of all stored columns of a table, inherited ones too; None if the DDL does not tell."""
        found = self._columns(name, set())
        return None if found is None else found[0] - found[1]

    def default_of(self, column: ColumnName) -> str | None:
        """Return the expression of a column's default; None if the DDL does not show one."""
        if (late := self.defaults.get(column)) is not None:
            return late
        table = self.tables.get(column[:2])
        return next((one.default for one in table.columns if one.name == column[2]), None) if table else None

    def _columns(self, name: Name, seen: set[Name]) -> tuple[frozenset[str], frozenset[str]] | None:
        """Return the names of all columns and of the generated ones, with those of the table's ancestors."""
        table = self.tables.get(name)
        if table is None or name in seen:
            return None
        seen.add(name)
        columns, generated = frozenset(column.name for column in table.columns), table.generated
        if table.of_type is not None:
            if (attributes := self.composites.get(table.of_type)) is None:
                return None
            columns |= frozenset(attributes)
        for parent in table.parents:
            if (inherited := self._columns(parent, seen - {parent})) is None:
                return None
            columns, generated = columns | inherited[0], generated | inherited[1]
        return columns, generated


def describe(archive: DdlArchive) -> Description:
    """Read the description from the statements in an archive."""
    reader = _Describing(archive.body)
    for entry in archive.contents.entries:
        reader.add(entry)
    return reader.description(archive.contents, tuple(impossible_entries(archive)))


class _Describing(Struct):
    """What was read from the entries of an archive so far."""

    ddl: bytes
    tables: dict[Name, DescribedTable] = field(default_factory=dict)
    oids: dict[Name, int] = field(default_factory=dict)
    keys: dict[Name, frozenset[str]] = field(default_factory=dict)
    identities: dict[Name, frozenset[str]] = field(default_factory=dict)
    defaults: dict[ColumnName, str] = field(default_factory=dict)
    sequences: dict[Name, str] = field(default_factory=dict)
    enums: dict[int, tuple[str, ...]] = field(default_factory=dict)
    composites: dict[Name, tuple[str, ...]] = field(default_factory=dict)
    fields: dict[int, tuple[str, ...]] = field(default_factory=dict)
    bases: dict[int, str] = field(default_factory=dict)
    owners: set[str] = field(default_factory=set)
    digests: dict[tuple[str, str], int] = field(default_factory=dict)
    database: list[tuple[ArchiveEntry, str]] = field(default_factory=list)
    extensions: set[str] = field(default_factory=set)
    types: dict[str, int] = field(default_factory=dict)
    unlogged: set[Name] = field(default_factory=set)
    grantees: set[str] = field(default_factory=set)
    collations: set[Name] = field(default_factory=set)
    unproved: set[str] = field(default_factory=set)

    def add(self, entry: ArchiveEntry) -> None:
        """Read an entry."""
        name, text = (shown(entry.schema), shown(entry.name)), statements_of_entry(self.ddl, entry)
        if entry.kind in COMPARED:
            self._add_digests(entry, name, text)
        is_of_database = entry.kind in (COMMENT, PRIVILEGES) and not entry.schema and entry.name.startswith("DATABASE ")
        if entry.kind in (DATABASE, DATABASE_PROPERTIES) or is_of_database:
            self.database.append((entry, text))
            return
        if entry.owner and entry.oid >= FIRST_OWN_OID:
            self.owners.add(shown(entry.owner))
        if entry.kind == TABLE:
            self._add_table(entry, name, text)
        elif entry.kind in (CONSTRAINT, INDEX):
            self._add_constraint(text)
        elif entry.kind == DEFAULT:
            # The statement is ALTER TABLE ONLY "schema"."table" ALTER COLUMN "column" SET DEFAULT …;
            schema, table_name, column = (shown(_undoubled(quoted)) for quoted in NAME.findall(text)[:3])
            _, _, default = text.strip().removesuffix(";").partition(" SET DEFAULT ")
            self.defaults[schema, table_name, column] = default
        elif entry.kind == SEQUENCE and not text.startswith("CREATE UNLOGGED "):
            self.sequences[name] = text
        elif entry.kind == EXTENSION:
            self.extensions.add(name[1])
        elif entry.kind in (TYPE, DOMAIN):
            self._add_type(entry, name, text)
        elif entry.kind == COLLATION:
            self.collations.add(name)
        else:
            self._add_grantees(entry, text)

    def _add_table(self, entry: ArchiveEntry, name: Name, text: str) -> None:
        if (table := read_table(text)) is None:
            return
        if text.startswith("CREATE UNLOGGED TABLE "):
            self.unlogged.add(name)
        elif text.startswith("CREATE TABLE "):
            self.tables[name], self.oids[name] = table, entry.oid

    def _add_digests(self, entry: ArchiveEntry, name: Name, text: str) -> None:
        if entry.kind in REMARKS:
            label = f"{entry.kind} of {name[1]}{f' in schema {name[0]}' * bool(name[0])}"
        else:
            label = f"{entry.kind} {name[0]}.{name[1]}" if name[0] else f"{entry.kind} {name[1]}"
        # Privileges are in the order in which somebody granted them.
        said = "\n".join(sorted(text.split("\n"))) if entry.kind == PRIVILEGES else text
        self.digests[entry.kind, label] = self.digests.get((entry.kind, label), 0) ^ hash(said)
        if entry.kind in OWNED:
            self.digests[OWNER, f"{OF_OWNER}{label}"] = hash(entry.owner)

    def _add_constraint(self, text: str) -> None:
        if key := KEY.search(text):
            # The statement is ALTER TABLE ONLY "schema"."table" ADD CONSTRAINT …
            schema, of = (shown(_undoubled(quoted)) for quoted in NAME.findall(text)[:2])
            self.keys[schema, of] = frozenset(_names(key[1]))
        elif unproved := UNPROVED.search(text):
            self.unproved.add(shown(_undoubled(unproved[2])))
        if identity := INDEX_IDENTITY.search(text):
            columns = INDEX_COLUMNS.search(text)
            items = split_list(text[columns.end() - 1 :]).items if columns else []
            found = (NAME.match(item) for item in items)
            table = shown(_undoubled(identity[2])), shown(_undoubled(identity[4]))
            self.identities[table] = frozenset(shown(_undoubled(match[1])) for match in found if match)

    def _add_grantees(self, entry: ArchiveEntry, text: str) -> None:
        if entry.kind == PRIVILEGES:
            self.grantees |= read_grantees(text)
        elif entry.kind == POLICY and (to := POLICY_TO.match(text)):
            self.grantees |= set(_names(to["roles"]))

    def _add_type(self, entry: ArchiveEntry, name: Name, text: str) -> None:
        # Without quotes, other names may look like that of an array or of a type in another schema.
        if all(map(PLAIN_NAME.fullmatch, name)):
            self.types[".".join(name)] = entry.oid
        if enum := ENUM.search(text):
            self.enums[entry.oid] = tuple(match.replace("''", "'") for match in LITERAL.findall(text[enum.end() :]))
        elif composite := COMPOSITE.search(text):
            items = split_list(text[composite.end() - 1 :]).items
            found = (NAME.match(item) for item in items)
            attributes = [(match[1], _type_in(match.string[match.end() :])) for match in found if match]
            self.composites[name] = tuple(shown(_undoubled(attribute)) for attribute, _ in attributes)
            self.fields[entry.oid] = tuple(type_ for _, type_ in attributes)
        elif domain := DOMAIN_OVER.search(text):
            self.bases[entry.oid] = _type_in(text[domain.end() : _end_of_statement(text, domain.end())])

    def description(self, contents: Contents, impossible: tuple[str, ...]) -> Description:
        """Return the description of all entries."""
        fed: dict[Name, list[ColumnName]] = {}
        sequences: dict[Name, DescribedSequence] = {}
        for name, text in self.sequences.items():
            of: ColumnName | None = None
            if IDENTITY_SEQUENCE.match(text):
                schema, table, column = (shown(_undoubled(quoted)) for quoted in NAME.findall(text)[:3])
                of = schema, table, column
                fed.setdefault(name, []).append(of)
            sequences[name] = read_sequence(text, self._type_of(of) if of else "bigint")
        for column_name, default in self._all_defaults():
            if match := NEXT_VALUE.match(default):
                names = _names(match[1].replace("''", "'"))
                if len(names) == 2:
                    fed.setdefault((names[0], names[1]), []).append(column_name)
        return Description(
            self.tables,
            self.oids,
            self.keys,
            self.identities,
            self.defaults,
            sequences,
            {name: tuple(columns) for name, columns in fed.items()},
            self.enums,
            self.composites,
            _read_database(self.database),
            frozenset(self.owners),
            frozenset(self.extensions),
            self.digests,
            impossible,
            contents.writer,
            self.types,
            _numbers(contents.server),
            self.fields,
            self.bases,
            frozenset(self.unlogged),
            frozenset(self.grantees),
            frozenset(self.collations),
            frozenset(self.unproved),
        )

    def _type_of(self, column: ColumnName) -> str:
        table = self.tables.get(column[:2])
        return next((one.type for one in table.columns if one.name == column[2]), "") if table else ""

    def _all_defaults(self) -> Iterator[tuple[ColumnName, str]]:
        for (schema, table_name), table in self.tables.items():
            for column in table.columns:
                if column.default is not None:
                    yield (schema, table_name, column.name), column.default
        yield from self.defaults.items()


def read_table(text: str) -> DescribedTable | None:
    """Read a CREATE TABLE statement; None if it is a partitioned table, which has no rows of its own."""
    return _read_nameless_table(without_table_name(text))


# Most statements are the same in every DDL of a chain.
@lru_cache(maxsize=1 << 15)
def _read_nameless_table(text: str) -> DescribedTable | None:
    listed = split_list(text)
    before, after = text[: listed.begin], text[listed.end : _end_of_statement(text, listed.end)]
    kinds = {match["word"] for match in KIND.finditer(f"{before} {after}") if match["word"]}
    if "PARTITION BY" in kinds:
        return None
    columns: list[DescribedColumn] = []
    generated: set[str] = set()
    for item in listed.items:
        if match := NAME.match(item):
            # Any other item is a constraint of the table.
            _read_column(shown(_undoubled(match[1])), item[match.end() :], columns, generated)
    parents, of_type = PARENTS.search(after), OF_TYPE.search(before)
    names = _names(parents[1]) if parents else []
    return DescribedTable(
        tuple(columns),
        frozenset(generated),
        tuple(zip(names[::2], names[1::2], strict=False)),
        (shown(_undoubled(of_type[2])), shown(_undoubled(of_type[4]))) if of_type else None,
        is_ordered=not kinds,
        has_full_identity=any(match["is_full"] for match in FULL_IDENTITY.finditer(text)),
    )


def _read_column(name: str, after: str, columns: list[DescribedColumn], generated: set[str]) -> None:
    """Read what follows the name of a column, and add the column."""
    word = next((match for match in AFTER_TYPE.finditer(after) if match["word"]), None)
    if any(match["word"] == "GENERATED" for match in AFTER_TYPE.finditer(after)):
        generated.add(name)
        return
    type_ = (after[: word.start()] if word else after).strip()
    default, is_not_null, begin = None, False, word.start() if word else len(after)
    if word and word["word"] == "DEFAULT":
        begin = _end_of_default(after, word.end())
        default = after[word.end() : begin].strip()
    is_not_null = any(match["word"] == "NOT NULL" for match in AFTER_TYPE.finditer(after, begin))
    if type_:
        columns.append(DescribedColumn(name, shown(type_.replace('"', "")), is_not_null, default))


def _type_in(text: str) -> str:
    """Return the type at the beginning of a definition, as format_type prints it, without quotes."""
    word = next((match for match in AFTER_TYPE.finditer(text) if match["word"]), None)
    return shown((text[: word.start()] if word else text).strip().replace('"', ""))


def _end_of_statement(text: str, begin: int) -> int:
    """Return the offset of the semicolon that ends the statement."""
    return next((match.start() for match in END.finditer(text, begin) if match["mark"]), len(text))


def _end_of_default(text: str, begin: int) -> int:
    """Return the offset at which the expression of a default ends."""
    depth = 0
    for match in AFTER_DEFAULT.finditer(text, begin):
        depth += {"(": 1, ")": -1}.get(match["mark"] or "", 0)
        if match["word"] and depth == 0:
            return match.start()
    return len(text)


def read_sequence(text: str, type_: str) -> DescribedSequence:
    """Read a sequence's definition; `type_` is its type if the statement names none."""
    bare = re.sub(STRING, "", text)
    increment = int(found[1]) if (found := INCREMENT.search(bare)) else 1
    named = SEQUENCE_TYPE.search(bare)
    bits = BITS.get(named[1] if named else type_)
    smallest = largest = None
    if bits is not None:
        smallest, largest = (1, (1 << bits) - 1) if increment > 0 else (-(1 << bits), -1)
    smallest = int(limit[1]) if (limit := SMALLEST.search(bare)) else smallest
    largest = int(limit[1]) if (limit := LARGEST.search(bare)) else largest
    return DescribedSequence(increment, CYCLES.search(bare) is not None, smallest, largest)


def _numbers(version: str) -> tuple[int, ...]:
    match = SERVER_VERSION.match(version)
    return tuple(int(number) for number in match.groups() if number) if match else ()


def _read_database(entries: Iterable[tuple[ArchiveEntry, str]]) -> DescribedDatabase | None:
    """Read CREATE DATABASE and the properties of the database; None if the archive has no such entry."""
    entries = list(entries)
    texts = {entry.kind: text for entry, text in entries}
    properties = texts.get(DATABASE_PROPERTIES, "")
    limit, comment = CONNECTION_LIMIT.search(properties), DATABASE_COMMENT.match(texts.get(COMMENT, ""))
    found: DescribedDatabase | None = None
    settings: dict[tuple[str, str], tuple[str, ...]] = {}
    for entry, text in entries:
        for match in SETTING.finditer(text):
            role, name = (shown(_undoubled(quoted)) if quoted else "" for quoted in (match[2], match[5]))
            values = LITERAL.findall(match[6])
            settings[role, name] = tuple(shown(value.replace("''", "'")) for value in values)
        if entry.kind != DATABASE:
            continue
        # The name may contain anything.
        bare = NAME.sub("", text, count=1)
        options = {key: shown(quoted.replace("''", "'") or word) for key, quoted, word in OPTION.findall(bare)}
        both = options.get("LOCALE", "")
        found = DescribedDatabase(
            shown(entry.name),
            entry.oid,
            options.get("ENCODING", ""),
            options.get("LC_COLLATE", both),
            options.get("LC_CTYPE", both),
            PROVIDERS.get(options.get("LOCALE_PROVIDER", ""), ""),
            options.get("ICU_LOCALE", options.get("BUILTIN_LOCALE")),
            options.get("ICU_RULES"),
            settings,
            shown(entry.owner),
            shown(comment[2].replace("''", "'")) if comment else None,
            int(limit[1]) if limit else NO_LIMIT,
            IS_TEMPLATE.search(properties) is not None,
            read_privileges(texts.get(PRIVILEGES, ""), shown(entry.owner)),
        )
    return found


def read_privileges(text: str, owner: str) -> dict[tuple[str, str], bool] | None:
    """Return the privileges on a database after the statements, as (grantee, privilege): with grant option.

    Returns None if there are statements of other forms.
    """
    privileges = {(owner, one): False for one in PRIVILEGES_ON_DATABASE}
    privileges |= {("", one): False for one in DEFAULT_TO_PUBLIC}
    if GRANT.sub("", SESSION.sub("", text)).strip():
        return None
    for match in GRANT.finditer(text):
        grantee = shown(_undoubled(match["grantee"][1:-1])) if match["grantee"] else ""
        names = PRIVILEGES_ON_DATABASE if match["what"] == "ALL" else match["what"].split(",")
        for name in names:
            if match["verb"] == "GRANT":
                privileges[grantee, name] = privileges.get((grantee, name), False) or match["option"] is not None
            else:
                privileges.pop((grantee, name), None)
    return privileges


def read_grantees(text: str) -> set[str]:
    """Return the roles that GRANT statements on an object name, without PUBLIC."""
    names: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        names.append(match[1])
        return f'"{len(names) - 1}"'

    numbers = GRANTED_TO.findall(NAME.sub(numbered, text))
    return {shown(_undoubled(names[int(number)])) for number in numbers}


def _names(text: str) -> list[str]:
    return [shown(_undoubled(quoted)) for quoted in NAME.findall(text)]


def _undoubled(name: str) -> str:
    return name.replace('""', '"')

"""Adapt a shard's DDL to a role that is not a superuser, and find the part that only a superuser can create.

PostgreSQL lets an ordinary role give an object away only to an owner with CREATE on the object's schema, and a
publication only to an owner with CREATE on the database. A superuser need not care, and pg_dump does not: it writes
privileges after the objects. So each owner is lent that privilege, which is taken back before the dump's own grants.
All grants come after the rows, so that no owner's REVOKE from itself keeps its rows out.

Extensions, and the schemas that they are in, a superuser creates in the empty database, before anything of the source
can be there: by statements that are written here, with names that an entry has. Every role may use the foreign-data
wrappers among them: owners of servers have to. The role may fill their configuration tables. The rest is left out, by
name: event triggers, publications of all tables or of schemas, and privileges on objects of extensions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cutline.fleet.table_names import quote_identifier
from cutline.restore.ddl.ddl import Ddl, DdlEntry, SchemaLoadError, show_name
from cutline.restore.ddl.entries import ArchiveDdl
from cutline.restore.ddl.role_statements import REMARKS, is_of_event_trigger
from cutline.restore.ddl.statements import Statement, literal, statements_of
from cutline.snapshots.ddl.database_facts import OWN_PUBLICATION
from cutline.snapshots.ddl.ddl_archive import EXTENSION, PRIVILEGES, ArchiveEntry, statements_of_entry
from cutline.snapshots.ddl.ddl_archive import PRIVILEGES as PRIVILEGES_KIND
from cutline.snapshots.ddl.dump import DROP

# pg_dump quotes names always, or where they need it.
NAME = r'(?:"(?:[^"]|"")+"|[a-z_][a-z0-9_]*)'
OWNER = re.compile(
    rf"ALTER (?P<kind>[A-Z]+(?: [A-Z]+)*) (?P<first>{NAME})(?P<rest>.*) OWNER TO (?P<owner>{NAME});", re.DOTALL
)
GRANTOR = re.compile(rf"SET SESSION AUTHORIZATION (?P<role>{NAME});")
DEFAULTS = re.compile(rf"ALTER DEFAULT PRIVILEGES FOR ROLE (?P<role>{NAME}) ")
NO_GRANTOR = "RESET SESSION AUTHORIZATION;"
PRIVILEGE_VERBS = ("GRANT ", "REVOKE ", "ALTER DEFAULT PRIVILEGES ", "SET SESSION AUTHORIZATION ", NO_GRANTOR)
# What changes the role in adapted DDL.
SET_ROLE, RESET_ROLE = "SET ROLE ", "RESET ROLE;"
# Entries of archives have positive numbers.
LOANS_NUMBER = 0
CUTLINES = re.compile(rf'(?:CREATE|ALTER) PUBLICATION "?(?P<name>{OWN_PUBLICATION})"? ')
# The owner of schema public in a new database: a role that the database's owner is a member of.
PUBLIC, PUBLIC_OWNER = "public", "pg_database_owner"


@dataclass(slots=True)
class _Loans:
    """What owners were lent, with the statements that take it back, and the roles that were met.

    `ours` is the role that restores. It is lent nothing: it owns the database and everything that it creates there, and
    taking a loan back would take away its rights as the owner.
    """

    ours: str
    taking_back: dict[str, str] = field(default_factory=dict)
    schema_owners: dict[str, str] = field(default_factory=lambda: {PUBLIC: PUBLIC_OWNER})
    roles: dict[str, list[str]] = field(default_factory=dict)

    def lend(self, bare: str) -> Iterator[str]:
        """Yield the statement that lends an owner the privilege that the `bare` statement demands."""
        if not (match := OWNER.fullmatch(bare)):
            return
        kind, first, owner = match["kind"], match["first"], match["owner"]
        self.roles.setdefault(unquote(owner), []).append(f"{kind} {first}{match['rest']}")
        lending, back = "", ""
        if kind == "SCHEMA":
            self.schema_owners[unquote(first)] = unquote(owner)
        elif unquote(owner) == self.ours:
            return
        elif kind == "PUBLICATION":
            lending = _on_database("GRANT CREATE ON DATABASE %I TO", owner)
            back = _on_database("REVOKE CREATE ON DATABASE %I FROM", owner)
        elif match["rest"].startswith(".") and self.schema_owners.get(unquote(first)) != unquote(owner):
            lending = f"GRANT CREATE ON SCHEMA {first} TO {owner};"
            back = f"REVOKE CREATE ON SCHEMA {first} FROM {owner};"
        if lending and lending not in self.taking_back:
            self.taking_back[lending] = back
            yield lending


def _on_database(verb: str, owner: str) -> str:
    """A statement on the current database, whose name the DDL does not know."""
    statement = literal(f"{verb} {owner.replace('%', '%%')}")
    return f"DO {literal(f'BEGIN EXECUTE format({statement}, current_database()); END')};"


def adapt_ddl(ddl: Ddl, ours: str) -> Ddl:
    """The DDL for the role `ours` (raw text), which is not a superuser.

    Cutline's own publications are omitted: `init` makes them.
    """
    loans, privileges, omitted = _Loans(ours), list[DdlEntry](), dict[str, None]()

    def adapt(entries: Iterable[DdlEntry]) -> Iterator[DdlEntry]:
        for entry in entries:
            kept, granting = list[str](), list[str]()
            for one in statements_of(entry.statements):
                if match := CUTLINES.match(one.bare):
                    omitted[match["name"]] = None
                elif one.bare.startswith(PRIVILEGE_VERBS):
                    granting.append(_as_role(one, loans.roles))
                else:
                    kept += [f"\n{statement}\n" for statement in loans.lend(one.bare)]
                    kept.append(one.text)
            is_object = any(one.strip() for one in kept)
            if granting:
                granted = replace(entry, kind=PRIVILEGES_KIND, statements="".join(granting))
                # Where one entry creates an object and grants it, the grants become an entry of their own.
                own = replace(granted, number=-entry.number, dependencies=(entry.number,))
                privileges.append(own if is_object else granted)
            if is_object:
                yield replace(entry, statements="".join(kept))

    pre_data, post_data, event_triggers = (tuple(adapt(section)) for section in ddl.sections.values())
    if loans.taking_back:
        text = "\n".join(loans.taking_back.values())
        privileges.insert(0, DdlEntry(LOANS_NUMBER, PRIVILEGES_KIND, "", "lent privileges", text))
    return replace(
        ddl,
        pre_data=pre_data,
        post_data=(*post_data, *privileges),
        event_triggers=event_triggers,
        is_adapted=True,
        roles=loans.roles,
        omitted=tuple(omitted),
    )


def _as_role(statement: Statement, roles: dict[str, list[str]]) -> str:
    """The statement about privileges, with a grantor that a member of the role can be."""
    if match := DEFAULTS.match(statement.bare):
        roles.setdefault(unquote(match["role"]), []).append("default privileges")
    if match := GRANTOR.fullmatch(statement.bare):
        roles.setdefault(unquote(match["role"]), []).append("grants")
        return f"\n{SET_ROLE}{match['role']};"
    return f"\n{RESET_ROLE}" if statement.bare == NO_GRANTOR else statement.text


def unquote(name: str) -> str:
    """The name itself."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


EVENT_TRIGGER, SCHEMA, PUBLICATION = "EVENT TRIGGER", "SCHEMA", "PUBLICATION"
SCHEMA_PUBLICATION = "PUBLICATION TABLES IN SCHEMA"
CREATES = "CREATE EXTENSION "
CREATES_EXTENSION = re.compile(rf"CREATE EXTENSION IF NOT EXISTS (?P<name>{NAME})(?: WITH SCHEMA (?P<schema>{NAME}))?;")
PUBLISHES_ALL = re.compile(rf"CREATE PUBLICATION {NAME} FOR ALL TABLES\b.*", re.DOTALL)
CREATES_SCHEMA = "CREATE SCHEMA "
# Nothing else has made any.
LETS_USE = """DO $do$ DECLARE wrapper name; BEGIN
  FOR wrapper IN SELECT fdwname FROM pg_catalog.pg_foreign_data_wrapper LOOP
    EXECUTE pg_catalog.format('GRANT USAGE ON FOREIGN DATA WRAPPER %I TO PUBLIC', wrapper);
  END LOOP; END $do$;"""
# pg_dump writes the schema itself only if it is not as in a new database. All names are quoted.
PUBLIC_PRIVILEGES = 'SCHEMA "public"'
# The rows of extensions' configuration tables come with the snapshot.
LETS_FILL = """DO $do$ DECLARE one record; BEGIN
  FOR one IN SELECT n.nspname, c.relname FROM pg_catalog.pg_extension e CROSS JOIN unnest(e.extconfig) AS m (relation)
      JOIN pg_catalog.pg_class c ON c.oid = m.relation JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') LOOP
    EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %%I TO %(role)s', one.nspname);
    EXECUTE pg_catalog.format('GRANT SELECT, INSERT, UPDATE ON %%I.%%I TO %(role)s', one.nspname, one.relname);
  END LOOP; END $do$;"""


@dataclass(frozen=True, slots=True)
class Beforehand:
    """Statements (raw text) of a superuser in an empty database; the `schemas` that they create; and the omissions.

    Among these, `privileges` are the objects of extensions whose privileges are left out, by schema; "" is for objects
    without a schema.
    """

    statements: tuple[str, ...]
    schemas: frozenset[str]
    left_out: Mapping[str, str]
    privileges: Mapping[str, Sequence[str]]


def take_superusers_part(
    ddl: ArchiveDdl, role: str, refused: Collection[str] | None = None
) -> tuple[ArchiveDdl, Beforehand]:
    """Divide the DDL into the `role`'s part and a superuser's part; schemas belong to the role.

    With `refused`, the restore does without these extensions and without others that can't be created. The role meets
    all extensions then, too: those that exist it passes over, and each of the others is a statement that is refused.

    Raises SchemaLoadError if an extension is created by a statement of an unknown form.
    """
    own = {entry.name for entry in ddl.entries if entry.kind == SCHEMA}
    statements, schemas = list[str](), dict[str, None]()
    for entry in ddl.entries:
        if entry.kind == EXTENSION and entry.name not in (refused or ()):
            name, schema = _parse_extension(statements_of_entry(ddl.body, entry))
            if schema in own and schema not in schemas:
                schemas[schema] = None
                statements.append(f"CREATE SCHEMA {quote_identifier(schema)} AUTHORIZATION {quote_identifier(role)};")
            where = f" SCHEMA {quote_identifier(schema)}" if schema else ""
            statements.append(f"{CREATES}{quote_identifier(name)}{where};")
    if statements:
        statements += [LETS_USE, LETS_FILL % {"role": quote_identifier(role).replace("%", "%%").replace("'", "''")}]
    # Last: the statement before is in this language.
    if any(map(_drops_language, ddl.entries)):
        statements.append('DROP EXTENSION "plpgsql";')
    left_out, of_extensions = dict(_left_out(ddl)), list(_privileges_of_extensions(ddl))
    privileges: dict[str, list[str]] = {}
    for entry in of_extensions:
        privileges.setdefault(show_name(entry.schema), []).append(show_name(entry.name))
    without = {*left_out, *(entry.number for entry in of_extensions)}
    kept = ddl.without(entry for entry in ddl.entries if _publishes_all(ddl, entry))
    entries = tuple(
        entry
        for entry in kept.entries
        if entry.number not in without
        and (not _is_superusers(entry) or (refused is not None and entry.kind == EXTENSION))
    )
    named = {what: why for what, why in left_out.values() if what}
    return replace(kept, entries=entries), Beforehand(tuple(statements), frozenset(schemas), named, privileges)


def with_beforehand(ddl: Ddl, done: Beforehand) -> Ddl:
    """The DDL, adapted to the work that a superuser has done."""

    def adapt(entries: Iterable[DdlEntry]) -> Iterator[DdlEntry]:
        for entry in entries:
            if entry.kind == SCHEMA and entry.name in done.schemas:
                texts = (
                    statement.text
                    for statement in statements_of(entry.statements)
                    if not statement.bare.startswith(CREATES_SCHEMA)
                )
                yield replace(entry, statements="".join(texts))
            else:
                yield entry

    return replace(ddl, pre_data=tuple(adapt(ddl.pre_data)), beforehand=done.statements)


def _parse_extension(statement: str) -> tuple[str, str]:
    """The extension's name and its schema, "" if the statement names none."""
    match = CREATES_EXTENSION.fullmatch(statement.strip())
    if match is None:
        raise SchemaLoadError(
            f"the DDL creates an extension in a form that is not known: {show_name(statement.strip())}",
            hint="somebody changed the store, or another pg_dump wrote it: see: snapshot check",
        )
    return unquote(match["name"]), unquote(match["schema"] or "")


def _drops_language(entry: ArchiveEntry) -> bool:
    """Whether it drops plpgsql, the only extension that every new database has."""
    return entry.kind == DROP and entry.name == "EXTENSION plpgsql"


def _is_superusers(entry: ArchiveEntry) -> bool:
    """Whether a superuser has done it, or it is a remark on that."""
    return (
        entry.kind == EXTENSION
        or _drops_language(entry)
        or (entry.kind in REMARKS and not entry.schema and entry.name.startswith(f"{EXTENSION} "))
        or is_of_event_trigger(entry)
    )


def _publishes_all(ddl: ArchiveDdl, entry: ArchiveEntry) -> bool:
    if entry.kind != PUBLICATION:
        return entry.kind == SCHEMA_PUBLICATION
    first = next(
        (statement.bare for statement in statements_of(statements_of_entry(ddl.body, entry)) if statement.bare), ""
    )
    return PUBLISHES_ALL.fullmatch(first) is not None


def _left_out(ddl: ArchiveDdl) -> Iterator[tuple[int, tuple[str, str]]]:
    """The numbers of the entries that nobody creates, each with its name and why; remarks have no name."""
    for entry in ddl.entries:
        if is_of_event_trigger(entry):
            name = f"event trigger {show_name(entry.name)}" if entry.kind == EVENT_TRIGGER else ""
            yield entry.number, (name, "only a superuser creates it")
        elif _publishes_all(ddl, entry):
            yield entry.number, (f"publication {show_name(entry.name)}", "only a superuser publishes all tables")


def _privileges_of_extensions(ddl: ArchiveDdl) -> Iterator[ArchiveEntry]:
    """Privileges on objects that pg_dump does not write, because they belong to an extension."""
    # Those of a column depend on those of its table, too.
    written = {entry.number for entry in ddl.contents.entries if entry.kind != PRIVILEGES}
    for entry in ddl.entries:
        if entry.kind == PRIVILEGES and written.isdisjoint(entry.dependencies) and entry.name != PUBLIC_PRIVILEGES:
            yield entry

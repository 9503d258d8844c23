"""Adapt a shard's DDL to a role that is not a superuser, and separate the part that only a superuser can create.

An ordinary role may transfer an object only to an owner with CREATE on the object's schema, and a publication only to
an owner with CREATE on the database. Superusers are exempt, so pg_dump writes privileges after the objects. In adapted
DDL, each owner therefore gets a temporary grant of that privilege, a *loan*, which is revoked before the dump's own
grants. All grants come after the rows, so that an owner's REVOKE from itself doesn't prevent loading its rows. What is
only granted on schemas, types, functions and relations is granted before the indexes as well, because they call
functions as their tables' owners.

A superuser creates extensions and their schemas in the empty database, before it contains any of the source's objects.
The statements are generated here, with names from the entries. Every role may use the extensions' foreign-data
wrappers, because the owners of foreign servers must be able to use them. The restoring role may fill the extensions'
configuration tables. Everything else is omitted and reported by name: event triggers, publications of all tables or of
schemas, and privileges on extension objects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.table_names import quote_identifier
from cutline.nodes.publications import OWN_PUBLICATION
from cutline.restore.ddl.ddl import Ddl, DdlEntry, SchemaLoadError, show_name
from cutline.restore.ddl.entries import ArchiveDdl
from cutline.restore.ddl.role_statements import REMARKS, is_of_event_trigger
from cutline.restore.ddl.statements import Statement, literal, statements_of
from cutline.snapshots.ddl.ddl_archive import EXTENSION, PRIVILEGES, ArchiveEntry, statements_of_entry
from cutline.snapshots.ddl.ddl_archive import PRIVILEGES as PRIVILEGES_KIND
from cutline.snapshots.ddl.dump import DROP

# Depending on its options, pg_dump quotes all names, or only those that need quotes.
NAME = r'(?:"(?:[^"]|"")+"|[a-z_][a-z0-9_]*)'
OWNER = re.compile(
    rf"ALTER (?P<kind>[A-Z]+(?: [A-Z]+)*) (?P<first>{NAME})(?P<rest>.*) OWNER TO (?P<owner>{NAME});", re.DOTALL
)
GRANTOR = re.compile(rf"SET SESSION AUTHORIZATION (?P<role>{NAME});")
DEFAULTS = re.compile(rf"ALTER DEFAULT PRIVILEGES FOR ROLE (?P<role>{NAME}) ")
NO_GRANTOR = "RESET SESSION AUTHORIZATION;"
PRIVILEGE_VERBS = ("GRANT ", "REVOKE ", "ALTER DEFAULT PRIVILEGES ", "SET SESSION AUTHORIZATION ", NO_GRANTOR)
EARLY_GRANT = re.compile(r"GRANT [^\"]*? ON (?:SCHEMA|TYPE|FUNCTION|PROCEDURE|TABLE|SEQUENCE) ")
FROM_ALL, TO_ALL = re.compile(r" FROM PUBLIC;\Z"), re.compile(r" TO PUBLIC(?: WITH GRANT OPTION)?;\Z")
WITH_OPTION = " WITH GRANT OPTION;"
# The statements with which adapted DDL changes roles.
SET_ROLE, RESET_ROLE = "SET ROLE ", "RESET ROLE;"
# Entries in archives have positive numbers.
LOANS_NUMBER = 0
CUTLINES = re.compile(rf'(?:CREATE|ALTER) PUBLICATION "?(?P<name>{OWN_PUBLICATION})"? ')
# The owner of the public schema in a new database, a role whose only member is the database's owner.
PUBLIC, PUBLIC_OWNER = "public", "pg_database_owner"


class _Loans(Struct):
    """The loans of privileges to owners, with the statements that revoke them, and the roles found in the DDL.

    `ours`, the restoring role, gets no loans: it owns the database and everything it creates there, and revoking a loan
    would revoke its rights as the owner.
    """

    ours: str
    taking_back: dict[str, str] = field(default_factory=dict)
    schema_owners: dict[str, str] = field(default_factory=lambda: {PUBLIC: PUBLIC_OWNER})
    roles: dict[str, list[str]] = field(default_factory=dict)

    def lend(self, bare: str) -> Iterator[str]:
        """Yield the statement that lends an owner the privilege that the `bare` statement requires."""
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
    """Return a statement for the current database, whose name the DDL does not contain."""
    statement = literal(f"{verb} {owner.replace('%', '%%')}")
    return f"DO {literal(f'BEGIN EXECUTE format({statement}, current_database()); END')};"


def adapt_ddl(ddl: Ddl, ours: str) -> Ddl:
    """Adapt the DDL to the role `ours` (raw text), which is not a superuser.

    Omits Cutline's own publications, which `init` creates.
    """
    loans, privileges, omitted = _Loans(ours), list[DdlEntry](), dict[str, None]()
    early = list[str]()

    def adapt(entries: Iterable[DdlEntry]) -> Iterator[DdlEntry]:
        for entry in entries:
            kept, granting = list[str](), list[str]()
            statements = list(statements_of(entry.statements))
            early.extend(_early_grants(one.bare for one in statements))
            for one in statements:
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
                # If one entry creates an object and grants privileges on it, make the grants a separate entry.
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
        early_grants=tuple(early),
    )


def _early_grants(statements: Iterable[str]) -> Iterator[str]:
    """Yield the statements of an entry that grant what the indexes may need and that nothing takes back.

    Owners' grants that an entry gives after a REVOKE keep their place in it, and so do others' grants: then the entry
    has the same effect as without the early grants, and the privileges are in the same order.
    """
    bare = [statement for statement in statements if statement.startswith(PRIVILEGE_VERBS)]
    if any(
        one.startswith("SET SESSION") or (one.startswith("REVOKE ") and FROM_ALL.search(one) is None) for one in bare
    ):
        return
    has_revoked = any(one.startswith("REVOKE ") for one in bare)
    for one in bare:
        if EARLY_GRANT.match(one) and not (has_revoked and TO_ALL.search(one)):
            # A role with the grant option could become the grantor of the same grant in its entry, which PostgreSQL
            # refuses.
            yield f"{one.removesuffix(WITH_OPTION)};" if one.endswith(WITH_OPTION) else one


def _as_role(statement: Statement, roles: dict[str, list[str]]) -> str:
    """Rewrite a statement about privileges so that a member can act as the grantor."""
    if match := DEFAULTS.match(statement.bare):
        roles.setdefault(unquote(match["role"]), []).append("default privileges")
    if match := GRANTOR.fullmatch(statement.bare):
        roles.setdefault(unquote(match["role"]), []).append("grants")
        return f"\n{SET_ROLE}{match['role']};"
    return f"\n{RESET_ROLE}" if statement.bare == NO_GRANTOR else statement.text


def unquote(name: str) -> str:
    """Return the name without quotes."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


EVENT_TRIGGER, SCHEMA, PUBLICATION = "EVENT TRIGGER", "SCHEMA", "PUBLICATION"
SCHEMA_PUBLICATION = "PUBLICATION TABLES IN SCHEMA"
CREATES = "CREATE EXTENSION "
CREATES_EXTENSION = re.compile(rf"CREATE EXTENSION IF NOT EXISTS (?P<name>{NAME})(?: WITH SCHEMA (?P<schema>{NAME}))?;")
PUBLISHES_ALL = re.compile(rf"CREATE PUBLICATION {NAME} FOR ALL TABLES\b.*", re.DOTALL)
CREATES_SCHEMA = "CREATE SCHEMA "
# At this point, all foreign-data wrappers come from extensions.
LETS_USE = """DO $do$ DECLARE wrapper name; BEGIN
  FOR wrapper IN SELECT fdwname FROM pg_catalog.pg_foreign_data_wrapper LOOP
    EXECUTE pg_catalog.format('GRANT USAGE ON FOREIGN DATA WRAPPER %I TO PUBLIC', wrapper);
  END LOOP; END $do$;"""
# pg_dump writes this schema itself only if it differs from a new database's. All names are quoted.
PUBLIC_PRIVILEGES = 'SCHEMA "public"'
# The snapshot contains the rows of extensions' configuration tables, which the restoring role must load.
LETS_FILL = """DO $do$ DECLARE one record; BEGIN
  FOR one IN SELECT n.nspname, c.relname FROM pg_catalog.pg_extension e CROSS JOIN unnest(e.extconfig) AS m (relation)
      JOIN pg_catalog.pg_class c ON c.oid = m.relation JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') LOOP
    EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %%I TO %(role)s', one.nspname);
    EXECUTE pg_catalog.format('GRANT SELECT, INSERT, UPDATE ON %%I.%%I TO %(role)s', one.nspname, one.relname);
  END LOOP; END $do$;"""


class Beforehand(Struct, frozen=True):
    """What a superuser runs in an empty database: the statements (raw text), the `schemas` they create, the omissions.

    `privileges` are the extension objects whose privileges are left out, keyed by schema ("" for objects without a
    schema).
    """

    statements: tuple[str, ...]
    schemas: frozenset[str]
    left_out: Mapping[str, str]
    privileges: Mapping[str, Sequence[str]]


def take_superusers_part(
    ddl: ArchiveDdl, role: str, refused: Collection[str] | None = None
) -> tuple[ArchiveDdl, Beforehand]:
    """Divide the DDL into the `role`'s part and a superuser's part; schemas belong to the role.

    With `refused`, the restore continues without these extensions and any others that can't be created. In that case,
    the role's part also contains all extensions: existing ones are skipped, and the rest are reported as refused.

    Raises SchemaLoadError if an extension is created by a statement in an unknown form.
    """
    own = {entry.name for entry in ddl.entries if _creates_schema(ddl, entry)}
    statements, schemas = list[str](), dict[str, None]()
    for entry in ddl.entries:
        if entry.kind == EXTENSION and entry.name not in (refused or ()):
            name, schema = _parse_extension(statements_of_entry(ddl.body, entry))
            if schema in own and schema not in schemas:
                schemas[schema] = None
                statements.append(f"CREATE SCHEMA {quote_identifier(schema)} AUTHORIZATION {quote_identifier(role)};")
            where = f" SCHEMA {quote_identifier(schema)}" if schema else ""
            # If the source's plpgsql was created again, the DDL creates it, but every new database has it.
            statements.append(f"{CREATES}IF NOT EXISTS {quote_identifier(name)}{where};")
    if statements:
        statements += [LETS_USE, LETS_FILL % {"role": quote_identifier(role).replace("%", "%%").replace("'", "''")}]
    # Drop the language last, because the preceding statements use it.
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
    """Adapt the DDL to the objects that a superuser has already created."""

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
    """Return the extension's name and its schema ("" if the statement does not name one)."""
    match = CREATES_EXTENSION.fullmatch(statement.strip())
    if match is None:
        raise SchemaLoadError(
            f"the DDL creates an extension with a statement in an unknown form: {show_name(statement.strip())}",
            hint="an unsupported pg_dump wrote it, or somebody changed the store: compare it with the source; if it is"
            " right, restore as a superuser, for whom its form does not matter",
        )
    return unquote(match["name"]), unquote(match["schema"] or "")


def _creates_schema(ddl: ArchiveDdl, entry: ArchiveEntry) -> bool:
    """Whether the entry creates a schema, and does not only change the owner of `public`, which a new database has."""
    return entry.kind == SCHEMA and any(
        statement.bare.startswith(CREATES_SCHEMA) for statement in statements_of(statements_of_entry(ddl.body, entry))
    )


def _drops_language(entry: ArchiveEntry) -> bool:
    """Whether the entry drops plpgsql, the only extension that every new database has."""
    return entry.kind == DROP and entry.name == "EXTENSION plpgsql"


def _is_superusers(entry: ArchiveEntry) -> bool:
    """Whether a superuser creates the entry's object, or the entry is a comment or label on such an object."""
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
    """Yield the numbers of the omitted entries, each with its name and the reason; comments and labels have no name."""
    for entry in ddl.entries:
        if is_of_event_trigger(entry):
            name = f"event trigger {show_name(entry.name)}" if entry.kind == EVENT_TRIGGER else ""
            yield entry.number, (name, "only a superuser can create it")
        elif _publishes_all(ddl, entry):
            yield entry.number, (f"publication {show_name(entry.name)}", "only a superuser can publish all tables")


def _privileges_of_extensions(ddl: ArchiveDdl) -> Iterator[ArchiveEntry]:
    """Yield privileges on objects that are not in the archive because they belong to an extension."""
    # Ignore dependencies on other privileges: a column's privileges also depend on the table's.
    written = {entry.number for entry in ddl.contents.entries if entry.kind != PRIVILEGES}
    for entry in ddl.entries:
        if entry.kind == PRIVILEGES and written.isdisjoint(entry.dependencies) and entry.name != PUBLIC_PRIVILEGES:
            yield entry

"""The statements in an archive's entries, as pg_restore writes them, for the roles of a target.

In an archive, owners are separate values. Grantees, grantors, and the roles in policies, default privileges and user
mappings appear in statements. Each such statement has one of a few forms, with all identifiers quoted; any other form
is refused. Texts are raw (nodes.encodings).

pg_restore doesn't connect to a server: it writes a script in which marks separate the entries. So statements run in
Cutline's own sessions, whatever the target's version, encryption and credentials are, and each statement belongs to a
known entry.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field, structs

from cutline.fleet.table_names import quote_identifier
from cutline.nodes.encodings import raw_text
from cutline.nodes.programs import ClientPrograms, run_tool
from cutline.restore.ddl.ddl import shorten_statement, show_name, without_options
from cutline.restore.ddl.statements import statements_of
from cutline.restore.scope.scope import RoleChanges
from cutline.snapshots.ddl.ddl_archive import PRIVILEGES, ArchiveEntry, Contents, NewEntry, extract
from cutline.storage.errors import RefusedError

DEFAULT_PRIVILEGES, POLICY, USER_MAPPING = "DEFAULT ACL", "POLICY", "USER MAPPING"
KINDS = (PRIVILEGES, DEFAULT_PRIVILEGES, POLICY, USER_MAPPING)
NAME = r'"(?:[^"]|"")++"'
OBJECT = rf"(?:[^\"';]|{NAME})*?"
GRANT = re.compile(
    rf"(?P<begin>(?P<verb>GRANT|REVOKE) {OBJECT} (?:TO|FROM) )(?P<role>PUBLIC|{NAME})(?P<end>(?: WITH GRANT OPTION)?;)",
    re.DOTALL,
)
GRANTOR = re.compile(rf"SET SESSION AUTHORIZATION (?P<role>{NAME});", re.DOTALL)
NO_GRANTOR = "RESET SESSION AUTHORIZATION;"
DEFAULTS = re.compile(
    rf"(?P<begin>ALTER DEFAULT PRIVILEGES FOR ROLE )(?P<role>{NAME})(?P<schema>(?: IN SCHEMA {NAME})?) (?P<grant>.*)",
    re.DOTALL,
)
# The condition that follows the roles may be any text.
POLICY_ROLES = re.compile(
    rf"(?P<begin>CREATE POLICY {NAME} ON {NAME}\.{NAME}(?: AS RESTRICTIVE)?(?: FOR (?:SELECT|INSERT|UPDATE|DELETE))?)"
    rf"(?: TO (?P<roles>{NAME}(?:, {NAME})*))?(?P<end>(?: USING | WITH CHECK |;).*)",
    re.DOTALL,
)
MAPPING = re.compile(
    rf"(?P<begin>CREATE USER MAPPING FOR )(?P<role>{NAME})(?P<end> SERVER (?P<server>{NAME}).*)", re.DOTALL
)


class ChangedRoles(NamedTuple):
    """The omissions from DDL whose roles were changed, with the reasons, and the roles that it named (raw text)."""

    left_out: Mapping[str, str]
    met: frozenset[str]


class RoleUnmappableError(RefusedError):
    """A statement names roles in a form that might mean something else with other roles."""


class RoleStatements(Struct):
    """Changes the roles in one archive's statements, entry by entry.

    `met` are the roles that the statements name, and `left_out` are the omissions with their reasons.
    """

    changes: RoleChanges
    met: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    _sole: dict[tuple[str, ...], str] = field(default_factory=dict)

    def change(self, entry: ArchiveEntry, statements: str) -> str:
        """Replace the roles in the entry's statements; return "" if none is left. Raises RoleUnmappableError."""
        by_kind = {
            PRIVILEGES: self._privileges,
            DEFAULT_PRIVILEGES: self._default_privileges,
            POLICY: self._policy,
            USER_MAPPING: self._user_mapping,
        }
        return "".join(f"{line}\n" for line in by_kind[entry.kind](entry, statements))

    def _privileges(self, entry: ArchiveEntry, statements: str) -> Iterator[str]:
        """Change grants and their grantors. With no_owner, the restoring role becomes the only grantor."""
        grantor = ""
        for statement in statements_of(statements):
            if match := GRANTOR.fullmatch(statement.bare):
                grantor = self._meet(match["role"])
                if not self.changes.no_owner:
                    yield f"SET SESSION AUTHORIZATION {quote_identifier(self.changes.of(grantor))};"
            elif statement.bare == NO_GRANTOR:
                grantor = ""
                if not self.changes.no_owner:
                    yield statement.bare
            elif statement.bare:
                yield from self._grant(entry, statement.bare, grantor)

    def _grant(self, entry: ArchiveEntry, statement: str, grantor: str) -> Iterator[str]:
        if not (match := GRANT.fullmatch(statement)):
            raise _unmappable(entry, statement)
        if match["role"] == "PUBLIC":
            yield statement
            return
        role = self._meet(match["role"])
        if self.changes.no_owner and role == entry.owner:
            # With no_owner, the restoring role has an owner's privileges on its own objects.
            return
        if self.changes.lacks(role):
            if match["verb"] == "GRANT":
                self._leave_out(entry, role)
        elif not grantor or role == grantor or self.changes.of(role) != self.changes.of(grantor):
            # Skip a role that has become its own grantor, because it already has the privilege.
            yield match["begin"] + quote_identifier(self.changes.of(role)) + match["end"]

    def _default_privileges(self, entry: ArchiveEntry, statements: str) -> Iterator[str]:
        for statement in statements_of(statements):
            if not statement.bare:
                continue
            if not (match := DEFAULTS.fullmatch(statement.bare)):
                raise _unmappable(entry, statement.bare)
            role = self._meet(match["role"])
            mapped = self.changes.of(role)
            self._check_sole(entry, role, (entry.kind, entry.schema, entry.name, mapped))
            if self.changes.no_owner and mapped != self.changes.ours:
                self._leave_out(entry, role)
                continue
            begin = f"{match['begin']}{quote_identifier(mapped)}{match['schema']} "
            # Pass no owner, because a role's default privileges on its own objects are kept.
            yield from (begin + grant for grant in self._grant(_without_owner(entry), match["grant"], ""))

    def _policy(self, entry: ArchiveEntry, statements: str) -> Iterator[str]:
        if not (match := POLICY_ROLES.fullmatch(statements.rstrip())):
            raise _unmappable(entry, statements)
        if match["roles"] is None:
            yield statements.rstrip()
            return
        roles = [self._meet(name) for name in re.findall(NAME, match["roles"])]
        for role in filter(self.changes.lacks, roles):
            self._leave_out(entry, role)
        kept = dict.fromkeys(self.changes.of(role) for role in roles if not self.changes.lacks(role))
        if kept:
            yield f"{match['begin']} TO {', '.join(map(quote_identifier, kept))}{match['end']}"

    def _user_mapping(self, entry: ArchiveEntry, statements: str) -> Iterator[str]:
        if not (match := MAPPING.fullmatch(statements.rstrip())):
            raise _unmappable(entry, statements)
        role = self._meet(match["role"])
        self._check_sole(entry, role, (entry.kind, match["server"], self.changes.of(role)))
        if self.changes.lacks(role):
            self._leave_out(entry, role)
        else:
            yield match["begin"] + quote_identifier(self.changes.of(role)) + match["end"]

    def _meet(self, quoted: str) -> str:
        role = quoted[1:-1].replace('""', '"')
        self.met.add(role)
        return role

    def _leave_out(self, entry: ArchiveEntry, role: str) -> None:
        reason = "the target has no such role" if self.changes.lacks(role) else "it is not the restoring role"
        self.left_out[show_name(f"{_describe(entry)} of role {role}")] = reason

    def _check_sole(self, entry: ArchiveEntry, role: str, what: tuple[str, ...]) -> None:
        """Raise RoleUnmappableError if another role with the same replacement also has such an entry."""
        first = self._sole.setdefault(what, role)
        if first != role:
            raise RoleUnmappableError(
                f"roles {show_name(first)} and {show_name(role)} can't both become {show_name(self.changes.of(role))}:"
                f" both have {show_name(entry.name)}",
                hint="map one of them to a different role with --role-map",
                details={"object": show_name(entry.name)},
            )


def _describe(entry: ArchiveEntry) -> str:
    """Describe the object of a privilege, or the entry itself; its name begins with its type, except for a policy."""
    schema = f"{quote_identifier(entry.schema)}." if entry.schema else ""
    if entry.kind == PRIVILEGES:
        kind, _, name = entry.name.partition(" ")
        return f"privileges on {kind.lower()} {schema}{name}"
    if entry.kind == DEFAULT_PRIVILEGES:
        return entry.name.lower() + (f" in schema {quote_identifier(entry.schema)}" if schema else "")
    return f"policy {schema}{entry.name}" if entry.kind == POLICY else entry.name


def _without_owner(entry: ArchiveEntry) -> ArchiveEntry:
    return structs.replace(entry, owner="")


def _unmappable(entry: ArchiveEntry, statement: str) -> RoleUnmappableError:
    return RoleUnmappableError(
        f"the roles of {entry.kind} {show_name(entry.name)} can't be changed reliably:"
        f" {shorten_statement(show_name(without_options(entry.kind, statement)))}",
        hint="restore without --no-owner and --role-map, then change the roles afterwards",
        details={"object": show_name(entry.name)},
    )


MARK = "CUTLINE MARK"
# pg_restore writes privileges after all other entries, and event triggers after the privileges (pg_backup_archiver.c,
# _tocEntryRestorePass). The mark of such an entry has the entry's kind, so that it stays in front of the entry.
EVENT_TRIGGER = "EVENT TRIGGER"
REMARKS = ("COMMENT", "SECURITY LABEL")


class WrittenDdl(NamedTuple):
    """The script that pg_restore writes from an archive: its initial settings, and its statements by entry number."""

    settings: str
    statements: Mapping[int, str]


def write_statements(
    body: bytes, contents: Contents, entries: Iterable[ArchiveEntry], folder: Path, programs: ClientPrograms
) -> WrittenDdl:
    """Return the statements of the entries, as raw text; `folder` is a private folder. Raises ProgramFailedError."""
    entries, token = list(entries), secrets.token_hex(16)
    marked: list[ArchiveEntry | NewEntry] = []
    for entry in entries:
        marked += [NewEntry(_mark_kind(entry), token, f"-- {token} {entry.number}\n"), entry]
    archive, script = folder / f"{token}.archive", folder / f"{token}.sql"
    try:
        archive.write_bytes(extract(body, contents, marked))
        run_tool(
            "pg_restore",
            f"--file={script}",
            str(archive),
            # Versions without this option don't write lines for psql's restrict mode.
            *([f"--restrict-key={token}"] if programs.has("--restrict-key") else []),
            folder=programs.folder,
        )
        text = raw_text(script.read_bytes())
    finally:
        archive.unlink(missing_ok=True)
        script.unlink(missing_ok=True)
    for word in ("restrict", "unrestrict"):
        text = text.replace(f"\n\\{word} {token}\n", "\n")
    # pg_restore writes a comment before every entry, and so before every mark.
    comment = f"--\n-- Name: {token};"
    settings, *rest = (part.partition(comment)[0] for part in text.split(f"-- {token} "))
    numbered = (part.partition("\n") for part in rest)
    return WrittenDdl(settings, {int(number): statements for number, _, statements in numbered})


def is_of_event_trigger(entry: ArchiveEntry) -> bool:
    """Whether the entry is an event trigger, or a comment or label on an event trigger."""
    return entry.kind == EVENT_TRIGGER or (
        entry.kind in REMARKS and not entry.schema and entry.name.startswith(f"{EVENT_TRIGGER} ")
    )


def _mark_kind(entry: ArchiveEntry) -> str:
    if is_of_event_trigger(entry):
        return EVENT_TRIGGER
    return entry.kind if entry.kind in (PRIVILEGES, DEFAULT_PRIVILEGES) else MARK

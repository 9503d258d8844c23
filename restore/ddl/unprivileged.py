"""Adapt a shard's DDL to a role that is not a superuser, and say of which roles that has to be a member.

PostgreSQL lets an ordinary role give an object away only to an owner that may create in the object's schema, and a
publication only to one that may create in the database. A superuser need not care, and pg_dump does not: it writes
privileges after the objects. So each owner is lent that privilege, which is taken back before the dump's own grants.
All grants come after the rows, so that no owner's REVOKE from itself keeps its rows out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fleet.config import Node
from fleet.nodes.watch import Watch
from restore.ddl.scripts import ScriptDdl
from restore.ddl.statements import Statement, statements_of
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA
from snapshots.ddl.fingerprint import OWN_PUBLICATION

# pg_dump quotes names always, or where they need it.
NAME = r'(?:"(?:[^"]|"")+"|[a-z_][a-z0-9_]*)'
OWNER = re.compile(
    rf"ALTER (?P<kind>[A-Z]+(?: [A-Z]+)*) (?P<first>{NAME})(?P<rest>.*) OWNER TO (?P<owner>{NAME});", re.DOTALL
)
GRANTOR = re.compile(rf"SET SESSION AUTHORIZATION (?P<role>{NAME});")
DEFAULTS = re.compile(rf"ALTER DEFAULT PRIVILEGES FOR ROLE (?P<role>{NAME}) ")
NO_GRANTOR = "RESET SESSION AUTHORIZATION;"
PRIVILEGES = ("GRANT ", "REVOKE ", "ALTER DEFAULT PRIVILEGES ", "SET SESSION AUTHORIZATION ", NO_GRANTOR)
# What changes the role in adapted DDL.
SET_ROLE, RESET_ROLE = ROLE_CHANGES = ("SET ROLE ", "RESET ROLE;")
CUTLINES = re.compile(rf'(?:CREATE|ALTER) PUBLICATION "?(?P<name>{OWN_PUBLICATION})"? ')
# The owner of schema public in a new database: a role that the database's owner is a member of.
PUBLIC, PUBLIC_OWNER = "public", "pg_database_owner"


@dataclass(frozen=True, slots=True)
class AdaptedDdl:
    """The DDL for a role that is not a superuser, and the names of Cutline's publications, which are omitted.

    `roles` are the owners and grantors that the DDL names, each with what it owns or grants, as raw text.
    """

    ddl: ScriptDdl
    search_path: str | None
    roles: Mapping[str, list[str]]
    omitted: tuple[str, ...]

    @property
    def views(self) -> list[str]:
        """The materialized views that were populated, in the order of their dependencies."""
        return self.ddl.views

    def run_before_rows(self, node: Node, watch: Watch) -> None:
        """Run the script of what precedes the rows."""
        self.ddl.run_before_rows(node, watch)

    def run_after_rows(self, node: Node, ledger: str, watch: Watch) -> None:
        """Run the batches of what follows the rows that an earlier process has not run."""
        self.ddl.run_after_rows(node, ledger, watch)

    def run_last(self, node: Node, ledger: str, watch: Watch, first: str = "") -> None:
        """Run the statements `first`, drop the ledger and create event triggers."""
        self.ddl.run_last(node, ledger, watch, first)


@dataclass(slots=True)
class _Loans:
    """What owners were lent, with the statements that take it back, and the roles that were met.

    `ours` is the role that restores. It is lent nothing: it owns the database and what it creates there, and taking a
    loan back would take away what it has as the owner.
    """

    ours: str
    taking_back: dict[str, str] = field(default_factory=dict)
    schema_owners: dict[str, str] = field(default_factory=lambda: {PUBLIC: PUBLIC_OWNER})
    roles: dict[str, list[str]] = field(default_factory=dict)

    def lend(self, bare: str) -> Iterator[str]:
        """Yield the statement that lends an owner what the `bare` statement demands that it has."""
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
    statement = _literal(f"{verb} {owner.replace('%', '%%')}")
    return f"DO {_literal(f'BEGIN EXECUTE format({statement}, current_database()); END')};"


def _literal(text: str) -> str:
    """The text as a constant that means the same whether or not standard_conforming_strings is on."""
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return f"E{quoted}" if "\\" in text else quoted


def adapt_ddl(scripts: Mapping[str, str], search_path: str | None, ours: str) -> AdaptedDdl:
    """The DDL for the role `ours` (raw text), which is not a superuser.

    Cutline's own publications are omitted: `init` makes them.
    """
    loans, privileges, omitted = _Loans(ours), list[str](), dict[str, None]()
    adapted = dict(scripts)
    for section in (PRE_DATA, POST_DATA, EVENT_TRIGGERS):
        kept: list[str] = []
        for one in statements_of(scripts[section]):
            if match := CUTLINES.match(one.bare):
                omitted[match["name"]] = None
            elif one.bare.startswith(PRIVILEGES):
                privileges.append(_as_role(one, loans.roles))
            else:
                kept += [f"\n{statement}\n" for statement in loans.lend(one.bare)]
                kept.append(one.text)
        adapted[section] = "".join(kept)
    adapted[POST_DATA] += "".join(f"\n{statement}" for statement in loans.taking_back.values()) + "".join(privileges)
    return AdaptedDdl(ScriptDdl(adapted), search_path, loans.roles, tuple(omitted))


def _as_role(one: Statement, roles: dict[str, list[str]]) -> str:
    """The statement about privileges, with a grantor that a member of the role can be."""
    if match := DEFAULTS.match(one.bare):
        roles.setdefault(unquote(match["role"]), []).append("default privileges")
    if match := GRANTOR.fullmatch(one.bare):
        roles.setdefault(unquote(match["role"]), []).append("grants")
        return f"\n{SET_ROLE}{match['role']};"
    return f"\n{RESET_ROLE}" if one.bare == NO_GRANTOR else one.text


def unquote(name: str) -> str:
    """The name itself."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name

"""Adapt a shard's DDL to a role that is not a superuser, and say of which roles that has to be a member.

PostgreSQL lets an ordinary role give an object away only to an owner that may create in the object's schema, and a
publication only to one that may create in the database. A superuser need not care, and pg_dump does not: it writes
privileges after the objects. So each owner is lent that privilege, which is taken back before the dump's own grants.
All grants come after the rows, so that no owner's REVOKE from itself keeps its rows out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cutline.restore.ddl.ddl import Ddl, DdlEntry
from cutline.restore.ddl.statements import Statement, literal, statements_of
from cutline.snapshots.ddl.archive import PRIVILEGES as PRIVILEGES_KIND
from cutline.snapshots.ddl.fingerprint import OWN_PUBLICATION

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
SET_ROLE, RESET_ROLE = "SET ROLE ", "RESET ROLE;"
# Entries of archives have positive numbers.
LOANS_NUMBER = 0
CUTLINES = re.compile(rf'(?:CREATE|ALTER) PUBLICATION "?(?P<name>{OWN_PUBLICATION})"? ')
# The owner of schema public in a new database: a role that the database's owner is a member of.
PUBLIC, PUBLIC_OWNER = "public", "pg_database_owner"


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
                elif one.bare.startswith(PRIVILEGES):
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

"""Statements that set a database's own properties: settings, privileges, connection limit, labels.

These statements run last, in the transaction that creates event triggers, because they would affect the restore's own
sessions. The restoring role owns the database until the restore ends, because the restore record in the database's
comment is trusted only under that owner. Until then that role holds the privileges of the future owner, and changing
the owner transfers them (PostgreSQL manual, "ALTER DATABASE"). The owner, comment and template flag are set when the
record is removed (restore/targets/databases.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct, structs

from cutline.nodes.problems import quote
from cutline.restore.ddl.statements import literal
from cutline.restore.scope.scope import RoleChanges
from cutline.snapshots.ddl.database_facts import list_elements
from cutline.snapshots.ddl.ddl_archive import PRIVILEGES
from cutline.snapshots.records.commit import NO_LIMIT, DatabasePrivilege, DatabaseProperties, DatabaseSetting

# Settings whose values are lists of names that must be quoted individually (PostgreSQL's variable_is_guc_list_quote).
LISTS = frozenset(
    (
        "local_preload_libraries",
        "search_path",
        "session_preload_libraries",
        "shared_preload_libraries",
        "temp_tablespaces",
        "unix_socket_directories",
    )
)
# The elements of these lists are identifiers; the other lists contain file names.
IDENTIFIERS = frozenset(("search_path", "temp_tablespaces"))
# Servers accept any library name here, but if the library is missing, nobody can connect to the database anymore.
# A library in local_preload_libraries without a folder is in LOCAL, from where any role may load libraries.
PRELOADED = frozenset(("session_preload_libraries", "local_preload_libraries"))
LOCAL = "$libdir/plugins/"
# Separates a setting's name from the role that has it; names of settings contain no spaces.
OF_ROLE = " of role "
SET_KIND, LIMIT_KIND, LABEL_KIND = "DATABASE SETTING", "DATABASE CONNECTION LIMIT", "SECURITY LABEL"


class DatabasePiece(NamedTuple):
    """Statements that are run or refused as a unit, with a display kind and name (text, not raw)."""

    kind: str
    name: str
    statements: list[str]


class DatabaseDdl(Struct, frozen=True):
    """The statements that set a restored database's own properties, using the target's roles.

    `name` is the database's real name. `ours` is the restoring role; `owner` is "" if that role remains the owner.
    `loads`: the role can test whether any library loads.
    """

    name: str
    properties: DatabaseProperties
    ours: str
    owner: str = ""
    loads: bool = False

    @property
    def roles(self) -> list[str]:
        """The roles that must exist on the target."""
        properties = self.properties
        granted = [role for privilege in properties.privileges or () for role in (privilege.grantor, privilege.grantee)]
        named = [role for role in granted if role not in ("", properties.owner)]
        return list(
            dict.fromkeys(filter(None, [self.owner, *named, *(setting.role for setting in properties.settings)]))
        )

    @property
    def grantors(self) -> list[str]:
        """The roles, other than the owner, that granted privileges."""
        roles = (privilege.grantor for privilege in self.properties.privileges or ())
        return sorted({role for role in roles if role != self.properties.owner})

    @property
    def own_privileges(self) -> tuple[DatabasePrivilege, ...]:
        """The privileges that the future owner grants to the restoring role, which owns the database until then."""
        if self.owner in ("", self.ours):
            return ()
        given = self.properties.privileges or ()
        return tuple(
            privilege for privilege in given if (privilege.grantor, privilege.grantee) == (self.owner, self.ours)
        )

    def pieces(self, database: str) -> list[DatabasePiece]:
        """Return the pieces to run in the database, whose current name is `database`."""
        where, properties = quote(database), self.properties
        if self.own_privileges:
            others = tuple(
                privilege for privilege in properties.privileges or () if privilege not in self.own_privileges
            )
            properties = structs.replace(properties, privileges=others)
        grants = list(_grants(where, properties, quote(self.ours)))
        pieces = [DatabasePiece(PRIVILEGES, f"DATABASE {self.name}", grants)]
        for setting in properties.settings:
            label = setting.name + (f"{OF_ROLE}{setting.role}" if setting.role else "")
            pieces.append(DatabasePiece(SET_KIND, label, [*_loads(setting, of_any=self.loads), _set(where, setting)]))
        pieces.append(DatabasePiece(LABEL_KIND, f"DATABASE {self.name}", list(_labels(where, properties))))
        pieces.append(DatabasePiece(LIMIT_KIND, str(properties.connection_limit), list(_limit(where, properties))))
        return [piece for piece in pieces if piece.statements]


def change_roles(properties: DatabaseProperties, changes: RoleChanges) -> tuple[DatabaseProperties, list[str]]:
    """Replace the roles in a database's properties; also return a line for each property whose role is missing.

    With no_owner, the owner becomes the grantor of all privileges.
    """
    left_out: list[str] = []
    settings: list[DatabaseSetting] = []
    for setting in properties.settings:
        if setting.role and changes.lacks(setting.role):
            left_out.append(f"setting {setting.name} of role {setting.role}: the target has no such role")
        else:
            settings.append(structs.replace(setting, role=setting.role and changes.of(setting.role)))
    privileges: list[DatabasePrivilege] = []
    owner = changes.of(properties.owner)
    for privilege in properties.privileges or ():
        if privilege.grantee not in ("", properties.owner) and changes.lacks(privilege.grantee):
            left_out.append(
                f"{privilege.privilege} on the database for role {privilege.grantee}: the target has no such role"
            )
            continue
        grantor = owner if changes.no_owner else changes.of(privilege.grantor)
        privileges.append(
            structs.replace(privilege, grantor=grantor, grantee=privilege.grantee and changes.of(privilege.grantee))
        )
    kept = None if properties.privileges is None else tuple(privileges)
    return structs.replace(properties, owner=owner, privileges=kept, settings=tuple(settings)), left_out


def database_statements(database: str, properties: DatabaseProperties) -> list[str]:
    """Return the statements that set all properties of a database, for display."""
    where = quote(database)
    tablespace = f"ALTER DATABASE {where} SET TABLESPACE {quote(properties.tablespace)};"
    comment = f"COMMENT ON DATABASE {where} IS {literal(properties.comment or '')};"
    return [
        f"ALTER DATABASE {where} OWNER TO {quote(properties.owner)};",
        *([tablespace] if properties.tablespace else []),
        *([comment] if properties.comment is not None else []),
        *_grants(where, properties, quote(properties.owner)),
        *(_set(where, setting) for setting in properties.settings),
        *_labels(where, properties),
        *_limit(where, properties),
        *([f"ALTER DATABASE {where} IS_TEMPLATE true;"] if properties.is_template else []),
    ]


def _grants(where: str, properties: DatabaseProperties, owner: str) -> Iterator[str]:
    """Yield the statements that set exactly these privileges while the role `owner` (quoted) owns the database."""
    if properties.privileges is None:
        return
    yield f"REVOKE ALL ON DATABASE {where} FROM PUBLIC, {owner};"
    for grantor, granted in _in_order(properties.privileges, properties.owner):
        is_owner = grantor == properties.owner
        if not is_owner:
            yield f"SET ROLE {quote(grantor)};"
        for (grantee, with_option), alike in groupby(granted, key=_grantee_of):
            role = "PUBLIC" if not grantee else owner if grantee == properties.owner else quote(grantee)
            option = " WITH GRANT OPTION" if with_option else ""
            names = ", ".join(privilege.privilege for privilege in alike)
            yield f"GRANT {names} ON DATABASE {where} TO {role}{option};"
        if not is_owner:
            yield "RESET ROLE;"


def _grantee_of(privilege: DatabasePrivilege) -> tuple[str, bool]:
    return privilege.grantee, privilege.with_grant_option


def _in_order(privileges: Iterable[DatabasePrivilege], owner: str) -> Iterator[tuple[str, list[DatabasePrivilege]]]:
    """Yield the privileges grouped by grantor; every grantor receives its privileges before granting them."""
    waiting: dict[str, list[DatabasePrivilege]] = {}
    for privilege in privileges:
        waiting.setdefault(privilege.grantor, []).append(privilege)
    for grants in waiting.values():
        grants.sort(key=_grantee_of)
    able = {owner}
    while waiting:
        # PostgreSQL forbids circular grants, so the server refuses any.
        grantor = next((role for role in waiting if role in able), next(iter(waiting)))
        granted = waiting.pop(grantor)
        able.update(privilege.grantee for privilege in granted if privilege.with_grant_option)
        yield grantor, granted


def _set(where: str, setting: DatabaseSetting) -> str:
    what = f"ROLE {quote(setting.role)} IN DATABASE {where}" if setting.role else f"DATABASE {where}"
    return setting_statement(what, setting.name, setting.value)


def setting_statement(what: str, name: str, value: str) -> str:
    """Return ALTER … SET for `what`, a role or database; `value` has the format used in pg_db_role_setting."""
    return f"ALTER {what} SET {quote(name)} TO {setting_value(name, value)};"


def setting_value(name: str, value: str) -> str:
    """Convert a setting's value from the format used in pg_db_role_setting to the syntax of SET."""
    if name.lower() not in LISTS:
        return literal(value)
    return ", ".join(map(literal, list_elements(value, folds=name.lower() in IDENTIFIERS) or [""]))


def _loads(setting: DatabaseSetting, *, of_any: bool) -> Iterator[str]:
    """Yield the statements that load a setting's libraries; unless `of_any`, only those that any role may load."""
    if (name := setting.name.lower()) not in PRELOADED:
        return
    is_local = name == "local_preload_libraries"
    for library in filter(None, list_elements(setting.value, folds=False)):
        path = LOCAL + library if is_local and "/" not in library else library
        if of_any or is_local:
            yield f"LOAD {literal(path)};"


def _labels(where: str, properties: DatabaseProperties) -> Iterator[str]:
    for label in properties.labels:
        yield f"SECURITY LABEL FOR {quote(label.provider)} ON DATABASE {where} IS {literal(label.label)};"


def _limit(where: str, properties: DatabaseProperties) -> Iterator[str]:
    if properties.connection_limit != NO_LIMIT:
        yield f"ALTER DATABASE {where} CONNECTION LIMIT {properties.connection_limit};"

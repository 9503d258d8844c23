"""What becomes of the roles that own the restored objects, grant privileges on them, or are granted some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# No role has this name: it stands for all of them.
PUBLIC_ROLE = "public"


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """Which role takes the place of which. All names are in one form: as text, or raw as in DDL.

    With `no_owner` all objects belong to `ours`, the role that restores, which also grants everything; then `known` are
    the roles that the target has, and what was granted to others is left out.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    no_owner: bool = False
    ours: str = ""
    known: frozenset[str] = frozenset()

    def of(self, role: str) -> str:
        """The role in the restored database."""
        return self.names.get(role, role)

    def lacks(self, role: str) -> bool:
        """Whether what `role` was granted is left out, because the target has no such role."""
        return self.no_owner and role != PUBLIC_ROLE and self.of(role) not in self.known


UNCHANGED = RoleChanges()

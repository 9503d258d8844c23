"""Which values may be changed without a command refusing it: those that describe, and those that nothing else tells.

A value that describes is shown as it is, and decides nothing of a restore. Of a value that is recorded once, no
comparison can say that it is wrong; only a key of the store's owner could.
"""

from __future__ import annotations

import re
from typing import Any

from tests.mutations.values import Mutation, Place, differences, path_text

DESCRIPTIVE = (
    r"comment|seconds|created_at|terminal|global_id|rules.*|counts\.ignored",
    r"cut\.(id|attempts|causes(\[\d+\])?|seconds|included_early|in_flight|made_at|skew_seconds)",
    r"cut\.nodes\[\d+\]\.(marked_at|last_commit_at)",
    r"databases.*|left_out.*|baseline\[\d+\]\.(system_identifier|timeline|database_oid|database|server_version)",
    r"renewed\..*\.(reason|identity\.(system_identifier|timeline|database_oid|database|server_version))",
    # The next create compares them with the server's, and copies a table again where they differ.
    r"(schema_changes\.)?groups\..*\.columns\[\d+\]\.(type|type_oid|type_modifier|number)",
)
LACKING = (r"counts\..*", r"history\.recent\[\d+\]\.(cut|safe)_at")
SOLE = (
    # All of a commit's, too: those of another commit have the same names.
    r"sequences(\..*)?",
    r"(schema_changes\.)?groups\..*\.missing",
    r"baseline\[\d+\]\.(encoding|collate|ctype|locale_provider|locale|icu_rules)",
    r"(schema_changes\.)?roles\..*",
)


def is_descriptive(mutation: Mutation, before: Any, after: Any) -> bool:
    """Whether a document may be shown as it is after a mutation: a commit only if all that differs describes.

    Other documents are shown as they are. So are pins: they decide nothing of a restore, and one that can't be read
    keeps the whole snapshot, as a release that can't be read releases nothing.
    """
    if not mutation.key.startswith("snapshots/chain/") or "/pins/" in mutation.key:
        return True
    # Increments may lack some counts. None is shown for what is not there.
    is_lacking = mutation.way == "removed" and _matches(mutation.path, LACKING)
    if is_lacking or _matches(mutation.path, DESCRIPTIVE):
        return True
    return all(_matches(path, DESCRIPTIVE) for path in differences(before, after))


def is_sole(path: Place) -> bool:
    """Whether nothing else in the store tells what the value was."""
    return _matches(path, SOLE)


def _matches(path: Place, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, path_text(path)) for pattern in patterns)

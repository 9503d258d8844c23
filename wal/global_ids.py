"""Global ids: which two-phase gids of different nodes name one distributed transaction.

fleet.toml's `[cut] global_id` says how. A gid that the rule does not match is its own global id.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# The JDBC driver's gids: format id, global transaction id, branch qualifier, the last two in base64.
XA = r"^(?P<global>\d+_[A-Za-z0-9+/=]+)_[A-Za-z0-9+/=]*$"
# Citus: citus_<initiating group>_<process>_<transaction number>_<connection number>.
CITUS = r"^(?P<global>citus_\d+_\d+_\d+)_\d+$"


def global_ids(gids: pa.Array[Any], form: str) -> pa.Array[Any]:
    """The global id of every gid; `form` is exact, xa, citus or a regex with a group named global."""
    if form == "exact" or len(gids) == 0:
        return gids
    pattern = {"xa": XA, "citus": CITUS}.get(form, form)
    extracted = pc.extract_regex(gids, pattern)
    return pc.coalesce(pc.struct_field(extracted, "global"), gids)

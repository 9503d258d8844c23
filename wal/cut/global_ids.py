"""Global ids: which two-phase gids of different nodes name one distributed transaction.

fleet.toml's `[cut] global_id` says how. A gid that the rule does not match is its own global id.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# The JDBC driver's gids (RecoveredXid.xidToString): format id, which is a signed integer, global transaction id,
# branch qualifier, the last two in base64.
XA = r"^(?P<global>-?\d+_[A-Za-z0-9+/=]+)_[A-Za-z0-9+/=]*$"
# Citus's (Assign2PCIdentifier): citus_<initiating group>_<process>_<transaction number>_<connection number>, all
# of them unsigned.
CITUS = r"^(?P<global>citus_\d+_\d+_\d+)_\d+$"


def global_ids(gids: pa.Array[Any], form: str) -> pa.Array[Any]:
    """The global id of every gid; `form` is exact, xa, citus or a regex with a group named global."""
    if form == "exact" or len(gids) == 0:
        return gids
    known = {"xa": XA, "citus": CITUS}.get(form)
    if known:
        return pc.coalesce(pc.struct_field(pc.extract_regex(gids, known), "global"), gids)
    # Arrow's regular expressions are RE2: no look-around, no unnamed groups. fleet.toml was accepted by
    # Python's rules, so a rule of the operator's own is matched by those, once for every gid there is.
    encoded = gids.dictionary_encode()
    pattern = re.compile(form)
    names = pa.array([_names_global(pattern, gid) for gid in encoded.dictionary.to_pylist()], pa.string())
    return names.take(encoded.indices)


def _names_global(pattern: re.Pattern[str], gid: str) -> str:
    found = pattern.search(gid)
    return (found and found["global"]) or gid

"""The participants of a distributed transaction: how applications name the shards on which it has parts.

Names are separated by commas, semicolons, plus signs, ampersands, vertical bars or white space, so a gid such as
`order-4711@s1+s2` can contain them. A name is the id of a shard's primary, the id of one of its standbys, or a name
that fleet.toml lists under `known_as` of the primary.
"""

from __future__ import annotations

import re

# Between two lists of names that are stored together.
SEPARATOR = ","
_SEPARATORS = re.compile(r"[,;+&|\s]+")


def split_names(text: str) -> list[str]:
    """Return the names in a list of participants, in their order; the same name may occur twice."""
    return [name for name in _SEPARATORS.split(text) if name]


def is_single_name(text: str) -> bool:
    """Whether the text is one name in a list of participants."""
    return split_names(text) == [text]

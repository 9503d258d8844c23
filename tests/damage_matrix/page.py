"""docs/damage-matrix.md: the kinds of damage that a check finds, and those that no reader of a store can detect.

The page follows from the declared outcomes and from missed.txt; a run of all kinds confirms both.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from tests.damage_matrix.kinds import (
    MERGED,
    PAIRS,
    POINT,
    SINGLE,
    Doubted,
    Drilled,
    Found,
    Hidden,
    Kind,
    Refused,
    Restorable,
)

PATH = Path(__file__).parents[2] / "docs" / "damage-matrix.md"
WIDTH = 120
# The copies to which a kind is done, at the end of its name.
PLACE = re.compile(r" \([^()]*\)$")
COLUMNS = ("found", "refused", "doubted", "restorable", "drilled", "hidden", "missed")
FLEETS = {PAIRS: "with standbys", SINGLE: "without standbys", POINT: "restore points", MERGED: "merged"}
TITLE = "# What a check finds: the damage matrix"
INTRODUCTION = (
    "This page is written by `python -m tests.damage_matrix --write`. It lists {count} kinds of damage to the objects"
    " of a store, and the outcome of [`snapshot check`](check.md) for each. `make all` tries all of them, and `make"
    " test` a fixed sample. Each trial damages a copy of the store of a clean chain. If the check accepts the copy, the"
    " copy is restored, and compared with a restore of the clean chain.",
    "**Raw** damage is done to bytes, by a disk, a copying tool or a mistake. All other damage is **sealed**: the"
    " size, digest, seal, counts and listing of each damaged object and of all documents above it are computed again,"
    " so that they fit the damage. A bug in Cutline could do such damage, and so could a person who has the store's key"
    " and wants to deceive a reader. The fleet has two shards and, where the copies matter, a standby of each.",
    "A kind is *found* if the check exits with 1, and names the damage and its place. It is *refused* if the command"
    " ends with an error that names the cause. It is *doubted* if the check accepts the store with a warning, because"
    " there is another explanation. It is *restorable* if only `check --restorable` finds it, and *drilled* if only a"
    " server can tell: a drill or a restore refuses the store. It is *hidden* if no reader of the store can detect the"
    " damage: the check accepts the store without a warning. *Missed* kinds are faults of the check: it accepts the"
    " store, or does not warn, although a reader could detect the damage.",
)
DOUBTED = "Each of these would be a false alarm as a conflict, because there is another explanation:"
RESTORABLE = (
    "A check accepts these, and a restore refuses them. `check --restorable` finds them, and names the table, the"
    " constraint and a value:"
)
DRILLED = "A check accepts these, and a restore or drill refuses them:"
HIDDEN = (
    "Nothing in the store contradicts these kinds of damage. After the kinds in the first list, a restore brings back"
    " the same databases as before, because it does not use the damaged part. After the kinds in the second list, it"
    " brings back other databases; only a second copy outside of the store could show the difference."
)
MISSED = "A check accepts these, although a reader of the store could detect them:"
NOTHING_MISSED = "None."


def page_of(kinds: Iterable[Kind], missed: Collection[str]) -> str:
    """Return the text of the page."""
    kinds = list(kinds)
    parts = [TITLE, *(_wrapped(one.format(count=f"{len(kinds):,}")) for one in INTRODUCTION)]
    doubted = [one for one in kinds if isinstance(one.expected, Doubted) and one.id not in missed]
    parts += ["\n".join(_table(kinds, missed)), "## Doubted", DOUBTED, "\n".join(_grouped(doubted, _reason))]
    for of, title, text in ((Restorable, "Restorable", RESTORABLE), (Drilled, "Drilled", DRILLED)):
        accepted = [one for one in kinds if isinstance(one.expected, of) and one.id not in missed]
        parts += [f"## {title}", _wrapped(text), "\n".join(_grouped(accepted, _reason))]
    parts += ["## Hidden", _wrapped(HIDDEN)]
    for is_same, title in ((True, "### Restored as before"), (False, "### Restored as something else")):
        hidden = [one for one in kinds if isinstance(one.expected, Hidden) and one.expected.is_same == is_same]
        parts += [title, "\n".join(_grouped(hidden, _reason))]
    parts += ["## Missed"]
    open_kinds = [one for one in kinds if one.id in missed]
    parts += [MISSED, "\n".join(_grouped(open_kinds, lambda kind: kind.family))] if open_kinds else [NOTHING_MISSED]
    return "\n\n".join(parts) + "\n"


def outcome_of(kind: Kind, missed: Collection[str]) -> str:
    """Return the column of the table in which the kind is counted."""
    if kind.id in missed:
        return "missed"
    by_type: Mapping[type, str] = {
        Found: "found",
        Refused: "refused",
        Doubted: "doubted",
        Restorable: "restorable",
        Drilled: "drilled",
        Hidden: "hidden",
    }
    return by_type[type(kind.expected)]


def _table(kinds: Iterable[Kind], missed: Collection[str]) -> Iterator[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for kind in kinds:
        counts[kind.family, kind.fleet, outcome_of(kind, missed)] += 1
    families = list(dict.fromkeys(family for family, _, _ in counts))
    yield f"| damage | kinds | {' | '.join((*COLUMNS, *FLEETS.values()))} |"
    yield "|---" * (2 + len(COLUMNS) + len(FLEETS)) + "|"
    for family in (*families, ""):
        chosen = {key: count for key, count in counts.items() if family in ("", key[0])}
        by_outcome = [sum(count for key, count in chosen.items() if key[2] == outcome) for outcome in COLUMNS]
        by_fleet = [_of_fleet(chosen, fleet) for fleet in FLEETS]
        numbers = [sum(chosen.values()), *by_outcome, *by_fleet]
        yield f"| {family or '**all**'} | {' | '.join(map(str, numbers))} |"
    yield ""
    yield "The last four columns count, for each fleet, how many of its kinds are found, refused or doubted."


def _of_fleet(counts: Mapping[tuple[str, str, str], int], fleet: str) -> str:
    of_fleet = [(key[2], count) for key, count in counts.items() if key[1] == fleet]
    warned = sum(count for outcome, count in of_fleet if outcome in ("found", "refused", "doubted"))
    return f"{warned} of {sum(count for _, count in of_fleet)}" if of_fleet else ""


def _reason(kind: Kind) -> str:
    return "" if isinstance(kind.expected, Found | Refused) else kind.expected.reason


def _grouped(kinds: Iterable[Kind], by: Callable[[Kind], str]) -> Iterator[str]:
    """Yield a line for each group: its title, and its kinds by family, without the copies that are damaged."""
    names: dict[str, dict[str, dict[str, None]]] = {}
    counts: Counter[str] = Counter()
    for kind in kinds:
        names.setdefault(by(kind), {}).setdefault(kind.family, {})[PLACE.sub("", kind.name)] = None
        counts[by(kind)] += 1
    for title, families in names.items():
        some = ["; ".join(of_family) if family == title else f"*{family}*: {'; '.join(of_family)}"
                for family, of_family in families.items()]  # fmt: skip
        text = f"{title[0].upper()}{title[1:]} ({counts[title]}): {'. '.join(some)}"
        yield "\n".join(textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False))


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))

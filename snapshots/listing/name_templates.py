"""Names that a command makes or finds by itself: templates such as `nightly-{date}`.

A name is never used again, not after its snapshot was deleted either, so what runs by itself needs a new one each time.
A template with a full create is a new name; anywhere else it is the newest committed snapshot that it could have made.
Which of two creators gets a name is decided where every name is: by the conditional put of the commit.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from fleet.config import Fleet
from snapshots.operations.operation import pending_ids
from snapshots.records.commits import SnapshotMissingError, check_name, snapshot_names
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import read_intent
from snapshots.records.store_identity import read_identity
from storage.errors import UsageError
from storage.store import ObjectStore

# By field, what it becomes. A number has no leading zeros, so that no number has two names.
FIELDS = {"date": r"\d{4}-\d{2}-\d{2}", "time": r"\d{6}", "n": r"[1-9]\d*"}
DATE, TIME, NUMBER = FIELDS
HINT = "{date} (2026-11-20) and {time} (143307), both UTC, and {n}, the next number never used"


@dataclass(frozen=True, slots=True)
class Template:
    """A name with fields. `parts` are its texts, each with the field that follows it, None at the end."""

    text: str
    parts: tuple[tuple[str, str | None], ...]

    @property
    def fields(self) -> frozenset[str]:
        """The fields that it has."""
        return frozenset(field for _, field in self.parts if field)

    def rendered(self, now: datetime, number: int) -> str:
        """The name that it makes; raise UsageError if that is none."""
        moment = now.astimezone(UTC)
        values = {DATE: f"{moment:%Y-%m-%d}", TIME: f"{moment:%H%M%S}", NUMBER: str(number)}
        name = "".join(text + (values[field] if field else "") for text, field in self.parts)
        try:
            return check_name(name)
        except UsageError as error:
            raise UsageError(f"template {self.text!r} makes {name!r}: {error.message}", hint=error.hint) from error

    def values_in(self, name: str) -> tuple[str, str, int] | None:
        """Date, time and number in a name that it could have made ("" or 0 for a field it has not); else None.

        Of two names that one template made, the later one has the greater values.
        """
        seen: set[str] = set()
        pattern = ""
        for text, field in self.parts:
            pattern += re.escape(text)
            if field:
                pattern += f"(?P={field})" if field in seen else f"(?P<{field}>{FIELDS[field]})"
                seen.add(field)
        found = re.fullmatch(pattern, name, re.ASCII)
        if found is None:
            return None
        values = found.groupdict()
        return values.get(DATE, ""), values.get(TIME, ""), int(values.get(NUMBER, 0))


def is_template(text: str) -> bool:
    """Whether `text` is meant as a template: no name has a brace."""
    return "{" in text or "}" in text


def read_template(text: str) -> Template:
    """The template in `text`; raise UsageError naming the field or brace that is none."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(f"template {text!r} has a stray brace: {error}", hint=f"a template has {HINT}") from error
    for literal, field, form, conversion in parts:
        if is_template(literal):
            raise UsageError(f"template {text!r} has a stray brace", hint=f"a template has {HINT}")
        whole = f"{field}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
        if field is not None and whole not in FIELDS:
            raise UsageError(f"template {text!r} has an unknown field {{{whole}}}", hint=f"known are {HINT}")
    template = Template(text, tuple((literal, field) for literal, field, *_ in parts))
    # What no moment and number would make a name of is refused before the store is asked.
    template.rendered(datetime.now(UTC), 1)
    return template


def new_name(fleet: Fleet, text: str) -> str:
    """The name for a new snapshot: `text` itself, or what it makes as a template. Only a template asks the store."""
    if not is_template(text):
        return check_name(text)
    template = read_template(text)
    number = next_number(template, used_names(_store(fleet))) if NUMBER in template.fields else 0
    return template.rendered(datetime.now(UTC), number)


def newest_name(fleet: Fleet, text: str) -> str:
    """The name of a snapshot that is there: `text` itself, or the newest committed one that it could have made.

    Raises SnapshotMissingError if a template has made none.
    """
    if not is_template(text):
        return check_name(text)
    template = read_template(text)
    made = {name: values for name in snapshot_names(_store(fleet)) if (values := template.values_in(name))}
    if not made:
        raise SnapshotMissingError(
            f"there is no snapshot with a name of template {text}",
            hint="see: snapshot list",
            details={"template": text},
        )
    return max(made, key=lambda name: made[name])


def next_number(template: Template, used: Iterable[str]) -> int:
    """One more than the greatest number in the names that the template could have made."""
    return max((values[2] for name in used if (values := template.values_in(name))), default=0) + 1


def used_names(store: ObjectStore) -> set[str]:
    """Every name that is or was a snapshot's, or that an operation wants or wanted and has left objects under."""
    deleted = {child.removesuffix(".json") for child in store.list_children("deleted")}
    return {*store.list_children("snapshots"), *deleted, *_snapshots_to_read(store)}


def _snapshots_to_read(store: ObjectStore) -> Iterator[str]:
    """The snapshots of operations without an outcome; one that can't be read is no reason to find no name."""
    for operation_id in pending_ids(store):
        with suppress(ManifestError):
            yield read_intent(store, operation_id).snapshot


def _store(fleet: Fleet) -> ObjectStore:
    store = fleet.store.open()
    read_identity(store, fleet)
    return store

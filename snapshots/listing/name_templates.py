"""Make or find snapshot names from a template such as `nightly-{date}`.

A name is never used again, even after its snapshot is deleted, so a scheduled create needs a new name each time. In a
full create, a template makes a new name; in other commands, it matches the newest committed snapshot. If two creates
use the same name, the conditional put of the commit decides between them, as for any name.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct

from cutline.fleet.config import Fleet
from cutline.snapshots.operations.open_operations import document_names, open_operation_ids, resumable_creates
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import read_intent
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    check_name,
    cut_time,
    read_full,
    snapshot_names,
)
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError
from cutline.storage.store import ObjectMissingError, ObjectStore

# The pattern for each field. Numbers have no leading zeros, so that each number has only one form.
FIELDS = {"date": r"\d{4}-\d{2}-\d{2}", "time": r"\d{6}", "n": r"[1-9]\d*"}
DATE, TIME, NUMBER = FIELDS
HINT = "{date} (2026-11-20) and {time} (143307), both UTC, and {n}, the next unused number"


class FieldValues(NamedTuple):
    """The values of the fields in a name; "" or 0 for a field that the template lacks.

    For names made from one template, the values increase with time.
    """

    date: str
    time: str
    number: int


class Template(Struct, frozen=True):
    """A name with fields. `parts` are the literal texts, each with the field that follows it, or None at the end."""

    text: str
    parts: tuple[tuple[str, str | None], ...]

    @property
    def fields(self) -> frozenset[str]:
        """The template's fields."""
        return frozenset(field for _, field in self.parts if field)

    def render(self, now: datetime, number: int) -> str:
        """Return the name with these values; raise UsageError if it is not a valid name."""
        moment = now.astimezone(UTC)
        values = {DATE: f"{moment:%Y-%m-%d}", TIME: f"{moment:%H%M%S}", NUMBER: str(number)}
        name = "".join(text + (values[field] if field else "") for text, field in self.parts)
        try:
            return check_name(name)
        except UsageError as error:
            raise UsageError(f"template {self.text!r} produces {name!r}: {error.message}", hint=error.hint) from error

    def values_in(self, name: str) -> FieldValues | None:
        """Return the values of the fields in `name`; None if the name doesn't match the template."""
        seen: set[str] = set()
        pattern = ""
        for text, field in self.parts:
            pattern += re.escape(text)
            if field:
                pattern += f"(?P={field})" if field in seen else f"(?P<{field}>{FIELDS[field]})"
                seen.add(field)
        match = re.fullmatch(pattern, name, re.ASCII)
        if match is None:
            return None
        values = match.groupdict()
        return FieldValues(values.get(DATE, ""), values.get(TIME, ""), int(values.get(NUMBER, 0)))


def is_template(text: str) -> bool:
    """Whether `text` is a template, that is, contains a brace; names contain no braces."""
    return "{" in text or "}" in text


def read_template(text: str) -> Template:
    """Parse a template; raise UsageError if it contains an unknown field or a stray brace."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(
            f"template {text!r} contains a stray brace: {error}", hint=f"known fields are {HINT}"
        ) from error
    for literal, field, form, conversion in parts:
        if is_template(literal):
            raise UsageError(f"template {text!r} contains a stray brace", hint=f"known fields are {HINT}")
        whole = f"{field}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
        if field is not None and whole not in FIELDS:
            raise UsageError(
                f"template {text!r} contains an unknown field {{{whole}}}", hint=f"known fields are {HINT}"
            )
    template = Template(text, tuple((literal, field) for literal, field, *_ in parts))
    # Before the store is read, refuse a template that can't make a valid name.
    template.render(utc_now(), 1)
    return template


def new_name(fleet: Fleet, text: str) -> str:
    """Return the name of a new snapshot: `text`, or a name made from the template `text`.

    The store is read only for the {n} field.
    """
    if not is_template(text):
        return check_name(text)
    template = read_template(text)
    number = next_number(template, used_names(_store(fleet))) if NUMBER in template.fields else 0
    return template.render(utc_now(), number)


def newest_name(fleet: Fleet, text: str) -> str:
    """Return the name of an existing snapshot: `text`, or the newest committed name that matches the template `text`.

    Raises SnapshotMissingError if no snapshot matches a template.
    """
    if not is_template(text):
        return check_name(text)
    template = read_template(text)
    matching = {name: values for name in snapshot_names(_store(fleet)) if (values := template.values_in(name))}
    if not matching:
        raise SnapshotMissingError(
            f"no snapshot name matches template {text!r}",
            hint="run: snapshot list",
            details={"template": text},
        )
    return max(matching, key=lambda name: matching[name])


def full_name(fleet: Fleet, text: str) -> str:
    """Return the name of the next full snapshot: that of an interrupted one that matches `text`, or a new one."""
    return resumable_name(fleet, text) or new_name(fleet, text)


def resumable_name(fleet: Fleet, text: str) -> str:
    """Return the name of the newest full snapshot that can be resumed and matches the template `text`; "" if none."""
    if not is_template(text):
        return ""
    store, template = _store(fleet), read_template(text)
    names = [intent.snapshot for intent in resumable_creates(store, document_names(store))]
    return next((name for name in reversed(names) if template.values_in(name)), "")


class NewestSnapshot(NamedTuple):
    """The full snapshot whose cut is the newest, if any; those in `unread` can't be read, and may be newer."""

    full: FullSnapshot | None
    unread: tuple[str, ...]


def find_newest(store: ObjectStore) -> NewestSnapshot:
    """Find the full snapshot whose cut is the newest, or the newest restore point if none has rows.

    A snapshot that is being deleted is passed over. A cut in the future, when a clock was wrong, is the oldest.
    """
    # Imported here: the completion of names needs nothing of it.
    from cutline.snapshots.listing.listing import is_ahead

    newest: FullSnapshot | None = None
    unread: list[str] = []
    now = utc_now()
    for name in snapshot_names(store):
        try:
            full = read_full(store, name)
        except ManifestError:
            unread.append(name)
        except (SnapshotDeletedError, SnapshotMissingError):
            continue
        else:
            newest = max(
                [full] if newest is None else [newest, full],
                key=lambda one: (not one.only_cut, not is_ahead(cut_time(one), now), cut_time(one)),
            )
    return NewestSnapshot(newest, tuple(unread))


def next_number(template: Template, used: Iterable[str]) -> int:
    """Return 1 plus the greatest number in the used names that match the template."""
    return max((values.number for name in used if (values := template.values_in(name))), default=0) + 1


def used_names(store: ObjectStore) -> set[str]:
    """Return the names of existing and deleted snapshots, open operations, and failed operations that left objects."""
    deleted = {child.removesuffix(".json") for child in store.list_children("deleted")}
    return {*store.list_children("snapshots"), *deleted, *_open_names(store)}


def _open_names(store: ObjectStore) -> Iterator[str]:
    """Yield the snapshot names of operations without an outcome; an unreadable operation is skipped."""
    for operation_id in open_operation_ids(store):
        with suppress(ManifestError, ObjectMissingError):
            yield read_intent(store, operation_id).snapshot


def _store(fleet: Fleet) -> ObjectStore:
    store = fleet.store.open()
    read_identity(store, fleet)
    return store

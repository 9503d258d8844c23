"""The forms of definitions, in arrays: as many bytes for a column as its place, type and name take."""

from __future__ import annotations

import pickle

import numpy as np
from msgspec import structs

from cutline.check.own_types import CompositeType, DomainType, EnumType, joined
from cutline.check.table_forms import (
    INT4,
    INT8,
    LIMIT_MAX,
    VARCHAR,
    TableForms,
    TypedColumns,
    forms_of_shards,
    ranges,
)
from cutline.check.value_forms import NUMERIC
from cutline.nodes.groups import Column, Group
from cutline.snapshots.records.chain import Chain
from tests.unit.made_commits import full_commit, identity

ID, NOTE, NAME = (
    Column("id", "bigint", INT8, -1, 1),
    Column("note", "text", 25, -1, 2),
    Column("name", "character varying(3)", VARCHAR, 7, 3),
)
COUNT = Column("count", "integer", INT4, -1, 2)
ENTRY = Group(7, "public", "entry", "default", 1, (ID, NOTE, NAME), partitions=4)
LOG = Group(5, "app", "log", "full", 0, (COUNT, ID))
PAIR = Group(9, "public", "pair", "default", 2, (COUNT, ID, NAME))


def found(columns: TypedColumns, form: int) -> list[int]:
    return columns.places[columns.offsets[form] : columns.offsets[form + 1]].tolist()


def test_forms_are_in_the_order_of_their_numbers() -> None:
    forms = TableForms.of([ENTRY, LOG])
    assert (forms.numbers.tolist(), forms.widths.tolist(), forms.key_widths.tolist()) == ([5, 7], [2, 3], [0, 1])
    assert forms.masks.tolist() == [0, 3]
    assert {oid: [found(columns, form) for form in (0, 1)] for oid, columns in forms.types.items()} == {
        INT8: [[1], [0]],
        INT4: [[0], []],
        VARCHAR: [[], [2]],
    }
    assert forms.types[VARCHAR].limits.tolist() == [3]
    assert (forms.table(0), forms.column(0, 1), forms.column(1, 2)) == ("app.log", "id", "name")
    assert forms.has(np.array([4, 5, 6, 7, 8])).tolist() == [False, True, False, True, False]
    assert not TableForms.of([]).has(np.array([5])).any()


def test_the_form_of_a_key_has_only_its_columns() -> None:
    keys = TableForms.of([ENTRY, LOG, PAIR]).keys
    assert keys.widths.tolist() == [0, 1, 2]
    assert [found(keys.types[INT8], form) for form in range(3)] == [[], [0], [1]]
    assert len(keys.types[VARCHAR].places) == len(keys.types[VARCHAR].limits) == 0


def test_definitions_that_only_a_segment_has_are_added() -> None:
    both = TableForms.of([ENTRY, LOG, PAIR])
    assert TableForms.of([ENTRY]).adding([PAIR, LOG]).digest == both.digest
    assert TableForms.of([]).adding([PAIR, LOG, ENTRY]).digest == both.digest
    # A number has one definition, the commit's.
    assert both.adding([structs.replace(ENTRY, columns=(ID,))]) is both


def test_shards_with_the_same_tables_share_their_forms() -> None:
    other = structs.replace(ENTRY, columns=(ID, NOTE))
    groups = {"a": (ENTRY, LOG), "b": (LOG, ENTRY), "c": (other, LOG)}
    chain = Chain(structs.replace(full_commit(), groups=groups, baseline=tuple(map(identity, groups))))
    sent: list[TableForms] = []

    def send(forms: TableForms) -> int:
        sent.append(forms)
        return len(sent)

    assert forms_of_shards(chain, ["c", "a", "b"], {}, send) == {"a": 1, "b": 1, "c": 2}


MOOD = Column("mood", "public.mood", 16386, -1, 2)
LABELS = frozenset({b"sad", b"happy"})
MOODS, PAIRS = EnumType(LABELS), CompositeType(frozenset({("integer", "text")}))


def test_enums_have_their_labels_wherever_they_are_known() -> None:
    moods = structs.replace(PAIR, columns=(ID, MOOD, NOTE, MOOD), key_width=2)
    older = structs.replace(moods, number=6)
    forms = TableForms.of([moods, ENTRY, older], {9: {1: MOODS, 3: MOODS}})
    assert forms.own == {16386: ("public.mood", MOODS)}
    assert [found(forms.types[16386], form) for form in range(3)] == [[], [], [1, 3]]
    assert [found(forms.keys.types[16386], form) for form in range(3)] == [[], [], [1]]
    assert (forms.type_name(16386, None), forms.type_name(VARCHAR, 3)) == ("public.mood", "character varying(3)")
    added = forms.adding([LOG])
    assert (added.own, found(added.types[16386], 3)) == (forms.own, [1, 3])
    # Another shard, whose enum has one label more, has forms of its own.
    more = TableForms.of([moods, ENTRY, older], {9: dict.fromkeys((1, 3), EnumType(LABELS | {b"ok"}))})
    assert more.digest != forms.digest


def test_composite_types_are_known_by_their_names() -> None:
    moods = structs.replace(PAIR, columns=(ID, MOOD, NOTE, MOOD), key_width=2)
    forms = TableForms.of([moods], {9: {1: PAIRS, 3: PAIRS}})
    assert forms.own == {16386: ("public.mood", PAIRS)}
    assert (found(forms.types[16386], 0), found(forms.keys.types[16386], 0)) == ([1, 3], [1])
    assert forms.adding([LOG]).own == forms.keys.own == forms.own
    assert forms.type_name(16386, None) == "public.mood"
    assert forms.find_other([moods]) is None
    assert forms.digest != TableForms.of([moods]).digest
    other = joined(PAIRS, CompositeType(frozenset({("integer", "text", "date")})))
    assert forms.digest != TableForms.of([moods], {9: {1: other, 3: other}}).digest


def test_a_domain_has_the_limits_of_its_type_and_its_own_name() -> None:
    moods = structs.replace(PAIR, columns=(ID, MOOD, NOTE, MOOD), key_width=2)
    short, amount = DomainType(VARCHAR, 7), DomainType(NUMERIC, (6 << 16 | 2) + 4)
    for domain, limit in ((short, 3), (amount, 6 << 16 | 2), (DomainType(NUMERIC, -1), -1)):
        forms = TableForms.of([moods], {9: {1: domain, 3: domain}})
        assert forms.types[16386].limits.tolist() == [limit, limit]
        assert (found(forms.types[16386], 0), forms.keys.types[16386].limits.tolist()) == ([1, 3], [limit])
        assert (forms.base_of(16386), forms.type_name(16386, limit)) == (domain.base, "public.mood")
        # A segment tells a column's type, but not what the DDL says of it.
        assert forms.find_other([moods]) is None
    whole = TableForms.of([moods], {9: {1: DomainType(INT4, -1)}})
    assert (whole.types[16386].limits.tolist(), whole.base_of(16386)) == ([], INT4)
    # varchar has no limit, and the values of text are not checked.
    for domain in (DomainType(VARCHAR, -1), DomainType(25, -1)):
        assert 16386 not in TableForms.of([moods], {9: {1: domain}}).types


AMOUNT = Column("amount", "numeric(6,2)", NUMERIC, (6 << 16 | 2) + 4, 2)


def test_a_numeric_has_the_modifier_of_its_column() -> None:
    forms = TableForms.of([structs.replace(ENTRY, columns=(ID, AMOUNT, structs.replace(AMOUNT, type_modifier=-1)))])
    assert forms.types[NUMERIC].limits.tolist() == [6 << 16 | 2, -1]
    assert [forms.type_name(NUMERIC, limit) for limit in (6 << 16 | 2, -1)] == ["numeric(6,2)", "numeric"]


def test_a_definition_that_a_segment_has_otherwise_than_a_commit_is_found() -> None:
    moods = structs.replace(PAIR, columns=(ID, MOOD, NAME))
    forms = TableForms.of([ENTRY, LOG, moods], {9: {1: MOODS}})
    # Segments have no labels. Unknown numbers have no other definition.
    assert forms.find_other([moods, LOG, structs.replace(ENTRY, number=8)]) is None
    others = [
        structs.replace(ENTRY, table="other"),
        structs.replace(ENTRY, partitions=8),
        structs.replace(ENTRY, key_width=0),
        structs.replace(ENTRY, columns=(ID, NOTE)),
        structs.replace(ENTRY, columns=(ID, NAME, NOTE)),
        structs.replace(ENTRY, columns=(ID, NOTE, structs.replace(NAME, type_modifier=8))),
        structs.replace(ENTRY, columns=(ID, NOTE, structs.replace(NAME, name="title"))),
    ]
    for other in others:
        assert forms.find_other([LOG, other]) is other


def test_a_column_takes_a_few_bytes() -> None:
    columns = tuple(Column(f"column_{place:03}", "bigint", INT8, -1, place) for place in range(200))
    groups = [Group(number, "public", f"table_{number}", "default", 1, columns) for number in range(1, 501)]
    size = len(pickle.dumps(TableForms.of(groups)))
    # The place of a column is a number of 4 bytes, its name has 10 characters, and there is one end of a name.
    assert size < 500 * 200 * (4 + 10 + 1) * 1.05


def test_what_no_server_writes_is_no_crash() -> None:
    """A commit that somebody changed may name any number."""
    huge = structs.replace(NAME, type_modifier=1 << 40)
    forms = TableForms.of([structs.replace(ENTRY, number=1 << 40, columns=(ID, huge))])
    assert forms.types[VARCHAR].limits.tolist() == [LIMIT_MAX]
    assert forms.has(np.array([1 << 40])).all()


def test_ranges_are_concatenated() -> None:
    starts, counts = np.array([5, 1, 9]), np.array([2, 0, 3])
    assert ranges(starts, counts).tolist() == [5, 6, 9, 10, 11]
    assert len(ranges(starts[:0], counts[:0])) == 0

from __future__ import annotations

import pytest

from snapshots.dump_faults import corrected

# As pg_dump 18.4 writes it, with --quote-all-identifiers.
HEIR = '''CREATE TABLE "public"."q" (
    CONSTRAINT {} NOT NULL "B c",
    NOT NULL "a",
    "x" integer CONSTRAINT "own ""one""" NOT NULL,
    CONSTRAINT "z NOT NULL z" CHECK (("x" > 0))
)
INHERITS ("public"."p");
'''


@pytest.mark.parametrize(("bare", "quoted"), [
    ("na me", '"na me"'), ('Capital"s', '"Capital""s"'), ("plain", '"plain"'), ("new\nline", '"new\nline"'),
])  # fmt: skip
def test_the_name_of_an_inherited_not_null_constraint_is_quoted(bare: str, quoted: str) -> None:
    assert corrected(HEIR.format(bare) * 2) == HEIR.format(quoted) * 2


@pytest.mark.parametrize("script", [
    HEIR.format('"quoted"'),
    'CREATE FUNCTION "f"() RETURNS "text"\n    AS $$SELECT \'\n    CONSTRAINT x NOT NULL "B c",\n\'$$;\n',
    'COMMENT ON TABLE "public"."q" IS \'\n    CONSTRAINT x NOT NULL "y"\n\';\n',
])  # fmt: skip
def test_all_else_stays_as_it_is(script: str) -> None:
    assert corrected(script) == script

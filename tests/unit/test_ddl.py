from __future__ import annotations

from restore.ddl.scripts import remove_foreign_keys

# As pg_dump 18 writes a post-data section with --quote-all-identifiers.
POST_DATA = r'''
ALTER TABLE ONLY "public"."child"
    ADD CONSTRAINT "child_pkey" PRIMARY KEY ("id");

CREATE INDEX "note; FOREIGN KEY" ON "public"."child" USING "btree" ("parent");

ALTER TABLE ONLY "public"."child"
    ADD CONSTRAINT "child_parent_fkey" FOREIGN KEY ("parent") REFERENCES "public"."parent"("id") ON DELETE CASCADE;

ALTER TABLE ONLY "Odd"."a ""b"""
    ADD CONSTRAINT "FOREIGN KEY ""x""" FOREIGN KEY ("a;b") REFERENCES "public"."parent"("id") DEFERRABLE NOT VALID;

ALTER TABLE ONLY "public"."child"
    ADD CONSTRAINT "says FOREIGN KEY" UNIQUE ("parent");

ALTER TABLE "public"."measured"
    ADD CONSTRAINT "of_partitions" FOREIGN KEY ("id") REFERENCES "public"."parent"("id");
'''


def test_foreign_keys_are_removed_and_named() -> None:
    script, names = remove_foreign_keys(POST_DATA)
    assert names == [
        '"child_parent_fkey" of "public"."child"',
        '"FOREIGN KEY ""x""" of "Odd"."a ""b"""',
        '"of_partitions" of "public"."measured"',
    ]
    assert "REFERENCES" not in script
    for kept in ('"child_pkey" PRIMARY KEY', "CREATE INDEX", '"says FOREIGN KEY" UNIQUE'):
        assert kept in script


def test_nothing_is_taken_out_of_literals_names_and_bodies() -> None:
    """Comments on two indexes once made the script between them disappear, and what the owner wrote was run."""
    fake = 'ALTER TABLE ONLY "m"."t"\n    ADD CONSTRAINT "x" FOREIGN KEY ("a") REFERENCES "m"."u"("a");'
    script = (
        f'COMMENT ON INDEX "m"."one" IS \'\n{fake[:40]}\';\n'
        'ALTER TABLE ONLY "m"."t"\n    ADD CONSTRAINT "kept" PRIMARY KEY ("id");\n'
        f'COMMENT ON INDEX "m"."two" IS \'\n{fake}\nALTER ROLE m SUPERUSER;\';\n'
        f'CREATE FUNCTION "f"() RETURNS "text" LANGUAGE "sql" AS $$\n{fake}\n$$;\n'
        f'CREATE INDEX "\n{fake.replace(chr(34), chr(34) * 2)}" ON "m"."t" ("a");\n'
    )
    assert remove_foreign_keys(script) == (script, [])


def test_a_script_without_foreign_keys_is_unchanged() -> None:
    script = 'ALTER TABLE ONLY "a"."b"\n    ADD CONSTRAINT "c" PRIMARY KEY ("d");\n'
    assert remove_foreign_keys(script) == (script, [])

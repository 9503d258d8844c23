"""What a superuser creates beforehand in a new database, which already has schema public and plpgsql."""

from __future__ import annotations

from cutline.restore.ddl.entries import read_archive
from cutline.restore.ddl.unprivileged import take_superusers_part
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from tests.unit.made_archives import MadeEntry, made_archive

# As pg_dump writes the schema if it has another owner.
NOT_CREATED = "-- *not* creating schema, since initdb creates it\n\n\n"


def test_only_schemas_that_the_ddl_creates_are_created_beforehand() -> None:
    made = [
        MadeEntry("SCHEMA", "public", None, NOT_CREATED),
        MadeEntry("SCHEMA", "own", None, 'CREATE SCHEMA "own";\n\n\n'),
        *(
            MadeEntry("EXTENSION", name, None, f'CREATE EXTENSION IF NOT EXISTS "{name}" WITH SCHEMA "{schema}";\n\n\n')
            for name, schema in (("plpgsql", "pg_catalog"), ("pg_trgm", "public"), ("citext", "own"))
        ),
    ]
    _, done = take_superusers_part(read_archive(DdlArchive(*made_archive(made))), "drill")
    assert done.schemas == {"own"}
    assert done.statements[:4] == (
        'CREATE EXTENSION IF NOT EXISTS "plpgsql" SCHEMA "pg_catalog";',
        'CREATE EXTENSION IF NOT EXISTS "pg_trgm" SCHEMA "public";',
        'CREATE SCHEMA "own" AUTHORIZATION "drill";',
        'CREATE EXTENSION IF NOT EXISTS "citext" SCHEMA "own";',
    )

"""What the code of an ordinary owner tries when a restore runs it, and what it has become."""

from __future__ import annotations

EVIL = (
    "CREATE ROLE mallory LOGIN", "GRANT CONNECT ON DATABASE shop TO mallory",
    "CREATE SCHEMA m AUTHORIZATION mallory", "SET ROLE mallory",
    "CREATE FUNCTION m.evil(what text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN EXECUTE what; RETURN true;"
    " EXCEPTION WHEN OTHERS THEN RETURN true; END $$",
    "CREATE FUNCTION m.all() RETURNS boolean LANGUAGE sql AS $$ SELECT m.evil('ALTER ROLE mallory SUPERUSER')"
    " AND m.evil('GRANT pg_execute_server_program TO mallory') AND m.evil('GRANT postgres TO mallory')"
    " AND m.evil('COPY (SELECT 1) TO PROGRAM ''cat > /dev/null''') AND m.evil('SET SESSION AUTHORIZATION postgres') $$",
    "CREATE DOMAIN m.d AS int CHECK (m.all())",
    "CREATE FUNCTION m.computed(int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS"
    " $$ BEGIN RETURN m.all(); END $$",
    "RESET ROLE",
)  # fmt: skip
TABLES = (
    "CREATE TABLE m.t (id int PRIMARY KEY CHECK (m.all()), d m.d,"
    " g boolean GENERATED ALWAYS AS (m.computed(id)) STORED)",
    "INSERT INTO m.t VALUES (1, 1)",
    "CREATE INDEX ON m.t (m.computed(id))",
    "CREATE MATERIALIZED VIEW m.v AS SELECT m.all()",
)
POWERS = """
SELECT rolsuper, pg_has_role('mallory', 'pg_execute_server_program', 'MEMBER'), rolcreaterole, rolcreatedb
  FROM pg_roles WHERE rolname = 'mallory'
"""

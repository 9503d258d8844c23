pg_dump 18 does not quote the name of an inherited NOT NULL constraint: the snapshot's DDL was a syntax error.
--@ setup 0 1
CREATE TABLE parent (id int, "a b" int NOT NULL);
ALTER TABLE parent REPLICA IDENTITY FULL;
CREATE TABLE "An heir" (more int, CONSTRAINT "A name" NOT NULL "a b", PRIMARY KEY (id)) INHERITS (parent)
--@ interval
--@ transaction commit prepared
--@ shard 0
--@ statement
INSERT INTO "An heir" VALUES (1, 2, 3)
--@ shard 1
--@ statement
INSERT INTO parent VALUES (1, 2)

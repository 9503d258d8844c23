A server built without XML has empty xml columns: a restore to that server was refused.
--@ setup 0 1
CREATE TABLE one (id int PRIMARY KEY, x xml, more xml[])
--@ interval
--@ transaction commit prepared
--@ shard 0
--@ statement
INSERT INTO one VALUES (1, NULL, '{}'), (2, NULL, NULL)
--@ shard 1
--@ statement
INSERT INTO one VALUES (1, NULL, '{NULL}')

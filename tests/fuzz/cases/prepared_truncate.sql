A prepared transaction had truncated a table: reading the table's size waited for that transaction, and so did every create.
--@ setup 0 1
CREATE TABLE one (id int PRIMARY KEY, v text);
CREATE TABLE two (id int PRIMARY KEY, v text)
--@ interval
--@ transaction commit prepared
--@ shard 0
--@ statement
INSERT INTO one VALUES (1, 'x'), (2, 'y')
--@ shard 1
--@ statement
INSERT INTO one VALUES (1, 'x'), (2, 'y');
INSERT INTO two VALUES (1, 'x'), (2, 'y')
--@ interval
--@ transaction half commit
--@ shard 0
--@ statement
UPDATE one SET v = 'with it' WHERE id = 1
--@ shard 1
--@ statement
TRUNCATE one;
INSERT INTO one VALUES (3, 'z')
--@ transaction never
--@ shard 1
--@ statement
TRUNCATE two;
INSERT INTO two VALUES (3, 'z')

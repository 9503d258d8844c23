An update moved a row to the empty key and left a large value unchanged: the delete of the old key did not say where the value went.
--@ setup 0 1
CREATE TABLE one (id text PRIMARY KEY, large text STORAGE EXTERNAL, v int)
--@ interval
--@ transaction commit
--@ shard 0
--@ statement
INSERT INTO one VALUES ('a', repeat('x', 20000), 1), ('b', repeat('y', 20000), 1)
--@ shard 1
--@ statement
INSERT INTO one VALUES ('a', repeat('z', 20000), 1)
--@ interval
--@ transaction commit
--@ shard 0
--@ statement
UPDATE one SET id = '', v = 2 WHERE id = 'a'
--@ shard 1
--@ statement
UPDATE one SET id = '' WHERE id = 'a';
UPDATE one SET v = 3 WHERE id = ''
--@ interval
--@ transaction commit
--@ shard 0
--@ statement
UPDATE one SET id = 'c' WHERE id = '';
UPDATE one SET id = '' WHERE id = 'b'

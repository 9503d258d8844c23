-- The restore is unfinished: its databases still have temporary names, and databases with the final names may be those
-- that it will replace. So psql stops here. `snapshot restore-resume` tries the statements again, and with
-- --allow-refused-ddl it rewrites this file.
\quit

-- node s1, database bank
\set AUTOCOMMIT on
\set ON_ERROR_ROLLBACK off
\set SINGLELINE off
\set given :ON_ERROR_STOP
\set ON_ERROR_STOP on
\restrict 8d950fa7ff38fedd96edb2f120c135634365441cdee435d88bb4e702596d041f
\unrestrict 8d950fa7ff38fedd96edb2f120c135634365441cdee435d88bb4e702596d041f
-- To run them as another role, such as a superuser, change the user in the next line.
\connect -reuse-previous=off "user=postgres dbname=bank host=/var/tmp/cutline-nodes-9tv55bvi/s1 port=5432"
\set ON_ERROR_STOP :given
\unset given
\restrict 8d950fa7ff38fedd96edb2f120c135634365441cdee435d88bb4e702596d041f

SET client_encoding = 'SQL_ASCII'; SET standard_conforming_strings = on;
SET check_function_bodies = off;
SET search_path = '';

-- CONSTRAINT public.big big_pkey: could not create unique index "big_pkey": Key (id)=(3890) is duplicated.
SET default_tablespace = '';
--
-- Name: big big_pkey; Type: CONSTRAINT; Schema: public; Owner: postgres
--

ALTER TABLE ONLY "public"."big"
    ADD CONSTRAINT "big_pkey" PRIMARY KEY ("id");

SET client_encoding = 'SQL_ASCII'; SET standard_conforming_strings = on;
\unrestrict 8d950fa7ff38fedd96edb2f120c135634365441cdee435d88bb4e702596d041f

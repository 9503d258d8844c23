"""Servers: PostgreSQL of every version that Cutline supports, for the tests.

`make servers` installs them from packages (packages.py), each pinned by version and digest. An *installation* is a
folder of one build: `bin`, `lib`, `share`, and the features that the server reported. `SERVERS` contains a build of
each major version with all programs, TLS, XML and lz4; `ICU_SERVERS` contains a build of each with ICU. The wheel's
server, which users get, has none of these features.

With SNAPSHOT_TEST_SERVERS=required, as in CI, a run fails at its start if a server is missing. Otherwise the tests use
the servers that are installed, and the header of the run names them.
"""

"""Servers: PostgreSQL of every version that Cutline supports, for the tests.

`make servers` installs them from packages (packages.py), each pinned by version and digest. An *installation* is a
folder of one build: `bin`, `lib`, `share`, and what the server said that it can do. `SERVERS` has a build of each major
version with all programs, TLS, XML and lz4; `ICU_SERVERS` has a build of each with ICU. The wheel's server, which users
get, has none of these.

A run that sets SNAPSHOT_TEST_SERVERS=required fails at its start if one is missing, as CI does; otherwise the tests use
those that are there, and the header of the run names them.
"""

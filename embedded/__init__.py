"""Embedded: PostgreSQL servers from the wheel, made into a fleet to try Cutline on, and a bank that keeps it busy.

A *fleet folder* holds the servers' data, their fleet.toml and their store. Whatever stops the process, the folder
tells which servers are its own, so that they can be started again or deleted.

Imports `fleet` and `storage`.
"""

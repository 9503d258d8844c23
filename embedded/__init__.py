"""Embedded: a fleet of PostgreSQL servers from the wheel for trying Cutline, and a bank workload that keeps it busy.

A *fleet folder* contains the servers' data, their fleet.toml and their store. However the process ends, the folder
records which servers belong to the fleet, so that they can be started again or deleted.
"""

"""Spark: sessions, what executors must have, and plain functions that run as tasks of a job.

Only `start` builds a session; everything else receives one. A *lane* is a Spark task, which may run many of ours in
turn. A *share* is the weight of a task on its node.
"""

"""Spark: sessions, what tasks need from executors, and jobs that run plain functions as tasks.

Only `start` builds a session; everything else receives it. A *lane* is a Spark task, which may run many of Cutline's
tasks in turn. A *share* is the weight of a task on its node.
"""

"""The benchmark: compare Cutline with PostgreSQL's own tools, on one embedded shard, in one run.

A *measurement* is the runs of one task by one tool. A *comparison* is the ratio of two measurements, and may have an
aim: an upper bound for the ratio. Everything runs on this machine, in temporary folders and servers that are deleted
afterwards. A failed step is reported and makes the run fail, but the other steps continue.
"""

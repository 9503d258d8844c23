"""The benchmark: Cutline compared with PostgreSQL's own tools, on one embedded shard, in one run.

A *measurement* is one tool's runs of one task; a *comparison* sets two measurements side by side, with the aim if there
is one. Everything runs on this machine, in temporary folders and servers that are deleted afterwards. A failed step is
reported and makes the run fail; the other steps continue.
"""

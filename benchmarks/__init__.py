"""The benchmark: Cutline beside PostgreSQL's own tools, on one embedded shard, in one run.

A *measurement* is what one tool took for one task, several times over; a *comparison* sets two measurements
side by side, with the aim if there is one. Everything runs on this machine, in folders and servers of the
benchmark's own, which are gone afterwards. A step that fails is reported and makes the run fail; the others
go on.
"""

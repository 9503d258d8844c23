"""`snapshot watch`: one process takes increments on a schedule, and has the rest done by other commands.

A *task* is a kind of work that it repeats (TaskKind). Increments are taken in this process, which stays warm; full
snapshots, checks, drills and prunings run as commands of their own, each in a process that ends with it.
"""

"""`snapshot watch`: one process takes increments on a schedule, and runs other commands for the rest.

A *task* is a kind of work that the watch repeats (TaskKind). Increments are taken in this process, which stays warm;
each full snapshot, check, drill or pruning runs as a separate command, in its own process. Checks, drills, merges,
copies and gc are *concurrent tasks*: increments are taken while they run.
"""

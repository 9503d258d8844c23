"""Load the rows and large objects of a restore: the tasks of its Spark jobs, and the ledger that they keep.

A restore with `--data-only` *fills* existing empty tables in databases that may be in use at the same time. `filling`
and its neighbouring modules check the requirements, keep objects in the database until the restore ends, and verify the
foreign keys, which are not checked during the load.
"""

"""Load the rows and large objects of a restore: the tasks of its Spark jobs, and the ledger that they keep.

A restore of rows only *fills* existing empty tables in databases that others use at the same time. `filling` and its
neighbouring modules describe the requirements, the objects kept in a database until the restore ends, and the
verification of foreign keys, which are not checked during the load.
"""

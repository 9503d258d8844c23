"""Load the rows and large objects of a restore: the tasks of its Spark jobs, and the ledger that they keep.

A restore of rows alone *fills* tables that exist and are empty, in databases that others use meanwhile: `filling` and
the modules next to it describe its requirements, the objects that it keeps in a database until the restore ends, and
how foreign keys are verified that nothing checked while rows were loaded.
"""

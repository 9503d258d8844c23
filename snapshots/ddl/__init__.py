"""DDL: dumping a database's schema objects, and finding out how its tables changed between two commits.

A *fingerprint* identifies a state of the catalogs. An *attempt* is invalid, and is retried, if the fingerprint changes
while it runs. Roles, tablespaces and the rows of extension tables are read and stored with the DDL.
"""

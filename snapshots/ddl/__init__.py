"""DDL: dumping a database's schema objects, and finding the changes of its tables between two commits.

A *fingerprint* identifies a state of the catalogs. An *attempt* is invalid, and is retried, if the fingerprint changes
while it runs. Roles, tablespaces and the rows of extensions' tables are read and stored with the DDL.
"""

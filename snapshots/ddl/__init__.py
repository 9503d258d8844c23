"""DDL: a database's schema objects, how they are dumped, and how its tables changed between two commits.

A *fingerprint* identifies a state of the catalogs. An *attempt* is invalid if the fingerprint changes while it runs;
it is then retried. Roles, tablespaces and the rows of extensions' tables are read and stored with the DDL.
"""

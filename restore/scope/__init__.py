"""The scope of a restore: which shards and tables are restored, in which form, and to which target each row goes.

A *route*, given by `--route`, divides the rows of some tables among targets by an expression. A *table route* belongs
to one table and is resolved against its definition. Targets are numbered from 0, in the order they appear in their
file.
"""

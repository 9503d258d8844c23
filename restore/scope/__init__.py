"""The scope of a restore: which shards and tables it restores, in which form, and which target each row goes to.

A *route* names the expression that divides the rows of some tables among targets, as `--route` gives it. A *table
route* belongs to one table, resolved against its definition. Targets are numbered from 0, in the order of their file.
"""

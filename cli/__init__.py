"""The command `snapshot`. The only package that prints, exits or builds a Spark session.

A command's module is imported only once that command is to run.

Imports `cli.background`, `cli.folders`, `cli.output`, `columns` and `storage`.
"""

"""The command `snapshot`. The only package that prints, exits or builds a Spark session.

`main` imports `cli.output`, and a command's module only once that command is to run.
"""

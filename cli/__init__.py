"""The command `snapshot`. The only package that prints or exits.

A command's module is imported only once that command is to run.
"""

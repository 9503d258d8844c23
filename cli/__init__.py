"""The program `snapshot`. No other package prints or exits.

A command's module is imported only when that command runs.
"""

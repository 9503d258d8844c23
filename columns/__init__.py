"""Columns: the values of many rows as whole Arrow and numpy columns, and the lines that COPY reads and writes.

A *line* is one row in the text format of COPY, without its newline. A *bytes column* is many byte strings in one
buffer with their offsets. Nothing here loops over rows in Python, and nothing knows what a row means.

Imports nothing of the project.
"""

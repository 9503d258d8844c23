"""Columns: the values of many rows as whole Arrow and numpy columns, and the lines that COPY reads and writes.

A *line* is one row in COPY's text format. A *bytes column* holds many byte strings in one buffer with their offsets.
Code here neither loops over rows in Python nor interprets them. `python_workers` runs functions on Arrow batches in
Spark's Python workers.

This package does not import any other package of the project.
"""

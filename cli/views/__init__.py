"""Views: what is stored, as people look at it and as spreadsheets read it.

Pure functions from listings and reports to text and rows; `cli.output.results` writes them. A *flat* row stands for one
restore point.

Imports `cli.output`, `snapshots.activity`, `snapshots.listing` and `snapshots.records`.
"""

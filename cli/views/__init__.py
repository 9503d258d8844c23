"""Views: what is stored, as people look at it and as spreadsheets read it.

Pure functions from listings and reports to text and rows; `cli.output.results` writes them. A *flat* row stands for one
restore point. Imports `cli.output` and what lies below `cli`.
"""

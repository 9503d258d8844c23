"""Reports: figures about snapshots over time, in sections with charts and tables, on a page or in a terminal.

Every chart has a table with its figures. Strings from stores and nodes are shown as text, never as markup.
"""

"""Reports: figures of snapshots over time, as sections of pictures and tables; as a page, in a terminal and as JSON.

Every picture has a table with its figures. Strings from stores and nodes are shown as text, never as markup.
"""

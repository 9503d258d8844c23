"""Reports: figures of snapshots over time, as sections of pictures and tables; as a page, in a terminal and as JSON.

Every picture has a table with its figures. What stores and nodes say is text, never markup.
"""

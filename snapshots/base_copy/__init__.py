"""Base copy: the rows of a node's tables, read in an exported snapshot and stored as Parquet objects."""

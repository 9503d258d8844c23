"""Base copy: the rows of tables in an exported snapshot of a node, stored as Parquet objects."""

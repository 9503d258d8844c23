"""Base copy: the rows of tables as an exported snapshot of a node shows them, stored as Parquet objects."""

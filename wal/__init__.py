"""WAL: markers, the cut, slots, decoding, and the archive of compacted segments.

A *marker* is a logical message in a node's WAL; a *cut* is one WAL position per node and the global
transactions committed at it; a *segment* is a Parquet object of row changes and transaction events decoded
from one node's WAL. The archive of a node has no hole. Imports only `fleet` and `storage`.
"""

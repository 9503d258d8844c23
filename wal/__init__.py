"""WAL: slots, decoding, segments, markers and the cut.

The archive of a node has no hole, and a slot is advanced only past what the archive holds.
"""

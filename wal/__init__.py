"""WAL: slots, decoding, segments, markers and the cut.

The archive of a node has no gaps, and a slot is never advanced past the end of the archive.
"""

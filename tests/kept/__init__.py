"""Stores that are kept: written once, and read by every later version (docs/release.md).

`make kept` writes them anew, which is allowed only before version 1.0.0. From then on they stay as they are, and a
later version adds stores of its own beside them.
"""

"""The main paths on every version that Cutline supports, and from each to every newer one.

One server of each version is source and target of all tests here. What differs between versions on other paths is
tested where those paths are.
"""

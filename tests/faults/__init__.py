"""Faults: what can happen to a command, a node, the network, a disk or the store, and how a fleet must be after it.

A *fault* (injection.py) begins at a *point* of a create or when a *sight* is seen, and is mended once the command is
over; a *case* is one fault at one point. A *world* is a fleet as the commands see it while its applications write. In a
*contest* two creators are stopped between their steps. *Effects* are what is done to nodes and store between points.
"""

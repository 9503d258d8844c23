"""Faults of a command, a node, the network, a disk or the store, and the state that a fleet must be in afterwards.

A *fault* (injection.py) begins at a crash *point* of a create, or when an *effect* of one of its Spark tasks is seen
from outside (sights.py), and is repaired after the command. A *case* is one fault at one of these. A *world* is a fleet
as the commands see it while its applications write. In a *contest* two creates are stopped between their steps.
*Effects* (effects.py) are the changes to nodes and store between two points.
"""

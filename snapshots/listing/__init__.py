"""Listing: the contents of a store, read from its commits and outcomes alone, as lists, as figures and as metrics.

A *metric* has a name and a meaning (docs/monitoring.md), a *sample* is one value of it. All are gauges, because the
processes that report them are short: counts cover a window of time. An unknown value has no sample, rather than the
value 0.
"""

"""Listing: the contents of a store, read from its commits and outcomes alone, as lists, figures and metrics.

A *metric* has a name and a meaning (docs/monitoring.md), and a *sample* is a value of a metric. All metrics are gauges,
because the reporting processes are short-lived; counts cover a window of time. If a value is unknown, there is no
sample; the value is not reported as 0.
"""

"""Spark: the only place that builds a Spark session, with the JVM and the settings that it needs.

Imports `fleet` and `storage`.
"""

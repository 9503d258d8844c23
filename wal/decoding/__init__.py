"""Decoding: turn pgoutput's messages into changes and events, by whole columns.

Every message is checked against the format of its kind before any of its fields is used. A decoded row
consists of exactly the bytes that COPY writes for it.
"""

"""Decoding: turn pgoutput's messages into changes and events, whole columns at a time.

Every message is checked against the format for its kind before any of its fields is used. A decoded row consists of
exactly the bytes that COPY writes for it.
"""

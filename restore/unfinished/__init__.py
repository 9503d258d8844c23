"""Restores that ended unfinished: how they are found, resumed, abandoned or undone; and dropping old databases."""

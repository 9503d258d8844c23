"""Stores in the tests: the contract of every store, checks of stored documents, and damage to a store."""

"""Stores in the tests: the contract that every store keeps, documents as they are stored, and damage to both."""

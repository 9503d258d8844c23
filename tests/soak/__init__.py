"""Tests of processes that run for hours, with make targets of their own."""

"""`snapshot drill`: what it restores, asks, reports and leaves."""

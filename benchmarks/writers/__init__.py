"""What cuts and increments cost those who write."""

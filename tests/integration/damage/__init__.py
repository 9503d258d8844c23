"""One chain whose store is damaged in every way, and what list, show, check and restore make of it."""

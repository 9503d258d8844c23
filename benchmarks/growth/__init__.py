"""How costs grow: with the number of increments of a chain, and with the size of the fleet."""

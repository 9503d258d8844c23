"""How a run of the tests goes in several processes, and what it says of itself at its end."""

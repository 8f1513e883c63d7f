"""Floor 4: the public Pool, and what it is made of."""

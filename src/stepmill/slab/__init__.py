"""Floor 1: one block of shared memory with every action, result and control word."""

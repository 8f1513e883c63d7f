"""Floor 3: ways to run workers. Each is a `Backend`; data never passes through one."""

"""Floor 2: what runs where the envs are. Builds them, runs the native loop, does slow requests. Imports no RL library."""

"""The ground floor: what an env says of itself, what a user may choose, and every error. Imports NumPy only."""

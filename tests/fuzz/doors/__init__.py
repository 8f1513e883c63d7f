"""Random programs of the packages beside `Pool`: evaluations, leases, and vector envs, each against a model of its own.

A program depends on its number alone. `python -m tests.fuzz.doors` plays many.
"""

"""Random programs of public calls on a pool, each reproducible from its number.

`programs` draws, prints and shrinks programs; `player` plays a program on a pool, and `tests.pool_model` checks each value;
`requests`, `workers` and `mistakes` are moves. `python -m tests.fuzz` plays many.

This differs from `tests.chaos`, which steps one pool for a long time while faults are injected from outside: here the
*calls* are random, their combinations and their mistakes included.
"""

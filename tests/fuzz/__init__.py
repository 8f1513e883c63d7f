"""Random programs of public calls on a pool, against a model of what the pool must answer.

`envs` has envs whose every number is a function of (object, seed, number of the episode, step, actions); `programs` draws, prints and
shrinks programs; `model` predicts results; `player` plays a program on a pool and compares. `python -m tests.fuzz` plays many.

This differs from `tests.chaos`, which steps one pool for a long time while faults are injected from outside: here the
*calls* are random, their combinations and their mistakes included, and each value is predicted.
"""

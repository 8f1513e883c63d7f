"""Simulators of another Python: env functions whose envs run in another interpreter.

maker        `stepmill.foreign`, which makes the env function
env          the env in the worker, which passes each call on, and its spaces
process      the process of the other interpreter, its errors and its end
other_side   the program that the other interpreter runs
"""

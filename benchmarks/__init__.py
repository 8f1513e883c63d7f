"""The benchmarks of stepmill: every engine of a cell in its own driver process, round by round, in one run.

`python -m benchmarks.setup` builds the peers' environments, and `python -m benchmarks.run` prints the tables. The parent process needs only
the standard library; the packages of an engine are installed in the environment of its driver.
"""

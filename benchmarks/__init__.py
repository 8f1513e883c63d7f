"""The benchmarks of stepmill: every engine of a cell in its own driver process, round by round, in one run.

`python -m benchmarks.setup` builds the peers' environments, `python -m benchmarks.run` prints the tables. The parent needs nothing beyond
the standard library; what an engine needs is installed where its driver runs.
"""

"""A pytest plugin: replaces ALF's classes with stepmill's, before its tests import them."""

from __future__ import annotations

from alf.environments import fast_parallel_environment, parallel_environment, process_environment, utils

from stepmill.frontends.alf import FastParallelEnvironment, ProcessEnvironment

# These two modules hold ALF's own classes already: ParallelAlfEnvironment stays what it is.
assert parallel_environment
assert utils

fast_parallel_environment.FastParallelEnvironment = FastParallelEnvironment
process_environment.ProcessEnvironment = ProcessEnvironment

"""The data types that all other packages share. This package imports NumPy only.

env      EnvSpec: the facts about an env that the engine needs
tree     the structure of observations and actions
batch    Batch: the results of several envs
choices  the enums of the options, and the states of an env
options  PoolOptions and the records in it
records  Record: the base class of options
errors   all exceptions
closing  objects that a `with` block closes
kernel   the description of a kernel
stats    the statistics of a pool
received Received and EnvFault: the results and faults of Pool.receive
notices  warnings that point to the user's line
container  a file format: a header, a payload and a checksum
"""

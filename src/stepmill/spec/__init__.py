"""The data types that all other packages share. This package imports NumPy only.

env      EnvSpec: the facts about an env that the engine needs
tree     the structure of observations and actions
batch    Batch: the results of several envs
choices  the enums of the options, and the states of an env
options  PoolOptions and the records in it, of which ray_options has one; option_values checks single values
records  Record: the base class of options
errors   all exceptions; exception_classes finds those of other processes, and makes classes with two bases
closing  objects that a `with` block closes
kernel   the description of a kernel
stats    the statistics of a pool; stats_text writes them as text
received Received and EnvFault: the results and faults of Pool.receive
remote_env  time limits and errors of envs whose code runs in another interpreter
notices  warnings that point to the user's line
container  a file format: a header, a payload and a checksum
"""

"""The data types that all other packages share. This package imports NumPy only.

env      EnvSpec: what the engine knows about an env
tree     the structure of observations and actions
batch    Batch: the results of several envs
choices  the enums of the options, and the states of an env
options  PoolOptions and the records in it
records  Record: what options are made of
errors   all exceptions
closing  objects that a `with` block closes
notices  warnings that point to the user's line
capsule  the file format of crash capsules
json_values  values and constructors as JSON
"""

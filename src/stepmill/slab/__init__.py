"""The slab: one block of shared memory with every action, result and control word.

layout     the place of each field, and the parts that each worker may write
memory     the memory files of a slab, and its mapping in the learner
counters   reads the counters of a pool from its slab

Workers do not import this package. `stepmill.worker.env_host` maps a slab by the plan that the learner sends.
"""

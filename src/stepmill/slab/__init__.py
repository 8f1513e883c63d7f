"""The slab: one block of shared memory with every action, result and control word.

layout   where each field lies, and which parts each worker may write
memory   the memory files of a slab, and its mapping in the learner

Workers need neither: `stepmill.worker.env_host` maps a slab by the plan that the learner sends.
"""

"""`stepmill.evaluate` plays each pair of a task and a seed exactly once, and reports how well a policy performed.

plan.py         which episodes are to be played, and the options
evaluate.py     plays them: a queue over the envs of a pool
policies.py     calls policies of several kinds for the rows of a batch
episode_env.py  in the workers: changes the env for a task, and records videos
journal.py      the file from which a run that was killed continues
identity.py     the texts by which the policy and the tasks of this file are compared with those of the call
result.py       the results of each episode, and means with intervals
"""

"""`stepmill.evaluate`: plays pairs of a task and a seed, each exactly once, and says how well a policy did.

plan.py         which episodes are to be played, and the options
evaluate.py     plays them: a queue over the envs of a pool
policies.py     calls policies of several kinds for the rows of a batch
episode_env.py  in the workers: changes the env for a task, and records videos
journal.py      the file from which a run that was killed goes on
command.py      the command line
result.py       what is known about each episode, and means with intervals
"""

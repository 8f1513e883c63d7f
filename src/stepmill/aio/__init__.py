"""`stepmill.AsyncPool` provides the envs of a pool to the tasks of an asyncio event loop.

async_pool.py  starts and ends the pool
leases.py      gives envs to tasks, and each result to the task that awaits it
seats.py       the state of each env, and the choice of the env that a task gets
lease.py       the object with which a task uses an env
on_demand.py   an env that is built when it is leased, in the worker
batches.py     batches of results, for one task that acts for all envs
"""

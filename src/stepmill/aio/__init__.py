"""`stepmill.AsyncPool`: the envs of a pool for the tasks of an asyncio event loop.

async_pool.py  starts the pool, waits for it in the event loop, and gives each result to the task that awaits it
lease.py       what a task has while it uses an env
"""

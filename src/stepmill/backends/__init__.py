"""Ways to run workers. Each is a `Backend`; data never passes through one.

base              the protocol of a backend, the replies to slow requests, the errors that backends share
serial            envs in the caller's thread
thread            envs in threads of this process
process           envs in processes
launcher_client   starts worker processes through the launcher, and waits until they are ready
starter_client    starts the process that starts launchers, one per program
start_progress    shows on a terminal how many envs are built
worker_link       the learner's end of one worker process
ray               workers on the machines of a Ray cluster
foreign           envs of another library's pool, such as EnvPool
"""

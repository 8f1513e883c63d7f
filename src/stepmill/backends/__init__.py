"""Ways to run workers. Each is a `Backend`; data never passes through one.

base              the protocol of a backend, the replies to slow requests, the errors that backends share
serial            envs in the caller's thread
thread            envs in threads of this process
process           envs in processes
process_link      the learner's end of a process: its channel, its pidfd and its end; and of one that starts others on request
launcher_client   the launcher, which starts worker processes, and the wait until these are ready
starter_client    the process that starts launchers, one per program
start_progress    shows on a terminal how many envs are built
worker_link       the learner's end of one worker process: its requests and its state
ray               workers on the machines of a Ray cluster
foreign           envs of another library's pool, such as EnvPool
"""

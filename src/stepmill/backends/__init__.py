"""Ways to run workers. Each way is a `Backend`. Data never passes through a backend.

base              the protocol of a backend, the replies to slow requests, the errors that backends share
kernel            envs in compiled code
serial            envs in the caller's thread, and what such backends share
thread            envs in threads of this process
process           envs in processes
process_link      the learner's end of a process: of a worker, and of a process that starts others on request
launcher_client   the learner's end of the launcher, which starts worker processes; waits until these are ready
starter_client    the learner's end of the starter, which starts launchers
start_progress    shows on a terminal how many envs have been built
ray               workers on the machines of a Ray cluster
external_pool     envs of another library's pool, such as EnvPool
"""

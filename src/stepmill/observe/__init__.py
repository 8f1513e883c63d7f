"""What the commands do, and tools that read running pools. Packages below import this one only by name, when it is needed.

exit_status     exit statuses, and messages on stderr
catalog         finds the env that an id names, and the policy
run_command     `stepmill run` and `stepmill trace`
run             drives a pool with a policy and yields snapshots
report          shows snapshots as plain lines; the summary at the end
replay_command  `stepmill replay`: asks for trust, prints the result
replay          replays the episode of a crash capsule
attach          finds pools of other programs, and reads their counters
monitor         draws where a pool's time goes: `stepmill top`, `stepmill run`, `stepmill.monitor` (rich)
trace           records what the threads of a pool do: `stepmill.trace`
doctor          `stepmill doctor`: checks an env in child processes
findings        what these checks can find, with the cures
doctor_probe    checks of envs, in a child process for doctor, or in the caller's for `stepmill.testing.check_env`
process_usage   data of processes from the system, for these checks and for tune
compared_runs   the checks of runs that must be equal
tune            `stepmill.tune`, and the command: the search for how to run an env
tune_choice     what is measured, which configurations are compared, and which is chosen
tune_measure    measures one env alone, and pools by turns
tune_result     the result, and the program that it prints
compare         `stepmill bench`: measures engines in turn
progress        progress bars (rich)
video           grids of frames, and videos (ffmpeg)
"""

"""The command line, and what looks at running pools. Other packages import this one by name only, when it is asked for.

cli             entry point; exit statuses
commands        the commands `run` and `replay`, and the group of all commands (click)
inspection_commands  the commands `top`, `trace`, `doctor` and `bench` (click)
options         kinds of options that several commands have (click)
catalog         finds the env that an id names
policy          loads the policy that acts
run             drives a pool with a policy and yields snapshots
snapshot        the data of one snapshot
live            shows snapshots on a terminal (rich)
report          shows snapshots as plain lines; the summary at the end
replay_command  `stepmill replay`: asks for trust, prints the result
replay          replays the episode of a crash capsule
attach          finds pools of other programs, and reads their counters
monitor         draws where a pool's time goes: `stepmill top`, `pool.monitor()` (rich)
trace           records what the threads of a pool do: `pool.trace()`
trace_command   `stepmill trace`
doctor          `stepmill doctor`: findings about an env
doctor_probe    its checks, in a child process; own_process: what it asks the system
bench           `stepmill bench`
compare         measures engines in turn, for `bench` and `demo`
video           grids of frames, and videos (ffmpeg)
plots           timelines and bar charts (matplotlib)
demo            what `make run` shows: live runs and a comparison with Gymnasium's vector envs
"""

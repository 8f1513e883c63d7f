"""The command line: it runs envs in a pool, shows the run, and replays crash capsules. No other package imports this one.

cli             entry point; exit statuses
commands        the commands and their options (click)
catalog         finds the env that an id names
policy          loads the policy that acts
run             drives a pool with a policy and yields snapshots
snapshot        the data of one snapshot
live            shows snapshots on a terminal (rich)
report          shows snapshots as plain lines; the summary at the end
replay_command  `stepmill replay`: asks for trust, prints the result
replay          replays the episode of a crash capsule
demo            what `make run` shows: live runs and a comparison with Gymnasium's vector envs
"""

"""The public Pool, and its parts.

pool           the public Pool
port           what front-ends use of a pool beside its public names
arguments      checks of arguments
auto_backend   the backend for "auto"
plans          which backend, and which envs each worker and thread has
start          from env functions to a running pool
spinning       how long workers and the pool's thread spin before they sleep
receiving      sends commands, has the loop in which the pool's thread waits, and receives results
resets         seeds, options and masks of a reset become commands
requests       calls, attributes, properties and rendering of envs, and their futures
positions      what is saved of envs, and how it is restored
saved_file     the file of saved envs
stats          counters and timers of the workers
payloads       payloads of results become infos when they are first read
infos          merges the infos of many envs into one dict
workers        states, deaths and restarts of workers
events         what the core reports, what it takes as decisions, and what it knows of an env object
fault_policies the fault policies: decisions about failures and deaths, and their limits
recovery       from events to decisions and their effects; stores faults until they are raised
revival        restarts of workers before a reset, and by `revive`
replays        replays under way, and the calls that they repeat
call_log       the settings to re-apply to rebuilt envs, and the calls that a replay repeats
faults         fault records become errors
capsule        crash capsules and their files
crash_reporter writes crash capsules
advice         says when a pool is closed which option would make the program faster
"""

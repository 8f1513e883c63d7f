"""The fault policies: what the user gets after a fault.

base      the protocol of policies, their arguments, and limits
basic     the policies "raise" and "truncate"
replay    the policy "replay": which episodes are replayed, and when a replay is given up
replayer  carries out replays
call_log  the calls that replays repeat
"""

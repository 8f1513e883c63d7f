"""What the user gets after a fault: one module per policy.

base: the protocol, and what the policies are told · raise_errors: an error, once · truncate: the episode is cut short ·
replay: the episode is played again · call_log: the calls that a replay repeats · replayer: one replay, step by step.
"""

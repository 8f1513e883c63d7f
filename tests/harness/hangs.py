"""Time limits of tests' waits. The events take milliseconds, and only a hang takes longer than a limit, also on a busy machine."""

HANG_GUARD_S = 60.0
DEADLINE_S = 1.0  # an option that one env is to miss, and that the others must keep, though they may wait for a core

"""Time limits of tests' waits. The events take milliseconds, and only a hang takes longer than a limit, also on a busy machine."""

HANG_GUARD_S = 60.0

"""A check of kernels that are tables, beside Gymnasium's table."""

from __future__ import annotations

from typing import Any

NUM_TRIES = 60  # of an action with several outcomes


def check_outcomes(ours: Any, theirs: Any) -> None:
    """Check that in every seventh state each action has exactly the outcomes of Gymnasium's env that can happen."""
    for place in range(0, int(theirs.observation_space.n), 7):
        for action in range(int(theirs.action_space.n)):
            allowed = {(int(s), float(r), bool(t)) for p, s, r, t in theirs.P[place][action] if p > 0.0}
            found = set()
            for _ in range(NUM_TRIES if len(allowed) > 1 else 2):
                ours.memory.record.place = place
                obs, reward, terminated, _, _ = ours.step(action)
                found.add((int(obs), reward, terminated))
            assert found == allowed

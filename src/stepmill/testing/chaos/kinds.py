"""The kinds of rounds: what the pool is set to do, and what is done to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepmill.spec.options import OnFault, PoolOptions
from stepmill.testing.chaos.envs import HANG, KILL, RAISE

STEP_TIMEOUT_S = 0.4
CALL_TIMEOUT_S = 3.0
NUM_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of round.

    Attributes:
        options: of the pool, beyond those that all rounds have.
        fatal: actions that break an env whenever it is given them. Under replay there are none: playing again helps only
            against what does not happen again.
        steps, resets: how traps break a step, or a reset, once.
        has_capsules: whether a crash capsule of each fault is written, and read.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    fatal: tuple[int, ...] = (KILL, RAISE, HANG)
    steps: tuple[int, ...] = ()
    resets: tuple[int, ...] = ()
    rows_each: int = 1
    num_workers: int = 3
    has_capsules: bool = False

    @property
    def policy(self) -> OnFault:
        """What becomes of faults."""
        return OnFault(self.options.get("on_fault", OnFault.TRUNCATE))

    @property
    def num_spares(self) -> int:
        """How many objects there are more than envs."""
        return int(self.options.get("spare_envs", 0))

    @property
    def num_envs(self) -> int:
        """How many envs the pool has."""
        return NUM_ROWS // self.rows_each

    def pool_options(self, context: str, crash_dir: str | None) -> PoolOptions:
        """Return the options of the round's pool."""
        chosen: dict[str, Any] = {
            "on_fault": self.policy,
            "seeding": "per_episode",
            "context": context,
            "step_timeout_s": STEP_TIMEOUT_S,
            "reset_timeout_s": STEP_TIMEOUT_S,
            "call_timeout_s": CALL_TIMEOUT_S,
            "crash_dir": crash_dir if self.has_capsules else None,
            "max_restarts": 1_000_000,
            "restart_window_s": 0.02,
            **self.options,
        }
        return PoolOptions(**chosen)


_ONCE = (RAISE, RAISE, KILL, HANG)
KINDS = (
    Kind(name="truncate"),
    Kind(name="overlap", options={"overlap_resets": True}, resets=_ONCE, has_capsules=True),
    Kind(name="spares", options={"spare_envs": 3}, resets=_ONCE),
    Kind(name="retries", options={"reset_retries": 2, "reset_retry_wait_s": 0.01}, resets=(RAISE, RAISE, RAISE, KILL)),
    Kind(
        name="retries in new processes",
        options={"reset_retries": 2, "reset_retry_in": "new", "reset_retry_wait_s": 0.01},
        resets=_ONCE,
    ),
    Kind(name="batched", rows_each=2, steps=_ONCE),
    Kind(name="raise", options={"on_fault": "raise"}),
    Kind(name="replay", options={"on_fault": "replay"}, fatal=(), steps=_ONCE, resets=_ONCE, has_capsules=True),
    Kind(
        name="replay with overlap",
        options={"on_fault": "replay", "overlap_resets": True},
        fatal=(),
        steps=_ONCE,
        resets=_ONCE,
    ),
    Kind(
        name="replay with spares", options={"on_fault": "replay", "spare_envs": 3}, fatal=(), steps=_ONCE, resets=_ONCE
    ),
)

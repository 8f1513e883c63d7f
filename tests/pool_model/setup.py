"""The pool of a program or of a round, as far as the model has to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """A pool, and what may happen to it.

    Attributes:
        kind: of the envs, as in `envs.env_fns`.
        options: of the pool.
        verbs: how actions may make envs fail.
        lengths: of the episodes, by the number of the row; None: they are drawn.
        is_stormy: whether any env may be lost at any time, because workers are broken from outside.
        hides_faults: whether faults are so rare that replays repair all of them.
    """

    kind: str
    num_envs: int
    options: dict[str, Any]
    verbs: tuple[int, ...]
    lengths: tuple[int, ...] | None = None
    is_stormy: bool = False
    hides_faults: bool = False

    @property
    def rows_each(self) -> int:
        return 2 if self.kind == "batched" else 1

    @property
    def num_spares(self) -> int:
        return int(self.options.get("resets", {}).get("spare_envs", 0))

    @property
    def is_overlapped(self) -> bool:
        """Whether resets are made in advance, without spares."""
        return "overlap" in self.options.get("resets", {})

    def length_of(self, row: int) -> int | None:
        return None if self.lengths is None else self.lengths[row]

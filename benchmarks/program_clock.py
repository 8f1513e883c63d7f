"""The clock of a training program: the seconds of its start, of its rollouts and of its learner. A program prints them as its last line."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

BEGUN_S = float(os.environ.get("PROGRAM_BEGUN_S", time.time()))


class Clock:
    """Adds up the seconds of rollouts, and those in between, which are the learner's."""

    def __init__(self) -> None:
        self.start_s = self.rollout_s = self.learner_s = 0.0
        self._last_s = 0.0

    def begin_rollout(self) -> None:
        now_s = time.time()
        if self._last_s:
            self.learner_s += now_s - self._last_s
        else:
            self.start_s = now_s - BEGUN_S
        self._last_s = now_s

    def end_rollout(self) -> None:
        now_s = time.time()
        self.rollout_s += now_s - self._last_s
        self._last_s = now_s

    def between_rollouts(self, learn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that ends a rollout, learns, and begins the next one."""

        def learn_between(*args: Any, **kwargs: Any) -> Any:
            self.end_rollout()
            try:
                return learn(*args, **kwargs)
            finally:
                self.begin_rollout()

        return learn_between

    def end(self, *learned: Any) -> None:
        """Print the result, with a hash of what was learned: bytes, or networks of PyTorch. What comes after the last rollout is the learner's."""
        self.learner_s += time.time() - self._last_s
        digest = hashlib.sha256()
        for each in learned:
            digest.update(each if isinstance(each, bytes) else _weights(each))
        seconds = {name: value for name, value in vars(self).items() if name[0] != "_"}
        print(json.dumps({**seconds, "learned": digest.hexdigest()[:16]}), flush=True)


def _weights(network: Any) -> bytes:
    return b"".join(each.detach().cpu().numpy().tobytes() for each in network.parameters())


def make_sb3_callback() -> type[Any]:
    """Return a class of Stable-Baselines3's callbacks that has a clock, and prints its result at the end of the training."""
    from stable_baselines3.common.callbacks import BaseCallback

    class ClockCallback(BaseCallback):  # type: ignore[misc]  # mypy does not see the library
        def __init__(self) -> None:
            super().__init__()
            self._clock = Clock()

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            self._clock.begin_rollout()

        def _on_rollout_end(self) -> None:
            self._clock.end_rollout()

        def _on_training_end(self) -> None:
            self._clock.end(self.model.policy)

    return ClockCallback

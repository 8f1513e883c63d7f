"""Envs as actorcritic's users have them: no base class, any Python value for an observation, old gym's API or the new."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepmill.testing.gates import wait_at

LENGTH = 3  # an episode is over at t = 3


class OldEnv:
    """Old gym: four values. The observation is a dict with text, a tuple and the arguments of `reset`.

    Actions: a number is the reward. "raise", "exit" (os._exit(7)), "kill" (SIGKILL) and "wait" (at a gate) do what they
    say. The file `resets` in `folder` grows by a byte with each reset, `closed` by one with each close.
    """

    def __init__(self, identity: int = 0, *, folder: Path | None = None, gate: Path | None = None) -> None:
        self.observation_space = f"space of OldEnv {identity // 100}"
        self.action_space = ("any", "python", "value")
        self.identity = identity
        self.folder = folder
        self.t = self.episode = 0
        self.last_seed = None
        self.gate = gate

    def reset(self, **kwargs: Any) -> Any:
        self.t = 0
        self.episode += 1
        self.kwargs = kwargs
        self._count("resets")
        return self._observe()

    def step(self, action: Any) -> Any:
        self._count("steps")
        if action == "raise":
            raise KeyError("no such action")
        if action == "exit":
            os._exit(7)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "wait":
            wait_at(self.gate)
        self.t += 1
        return self._observe(), action, self.t >= LENGTH, {"t": self.t}

    def render(self, mode: str = "human") -> Any:
        return [self.identity, mode]

    def seed(self, seed: int) -> None:
        self.last_seed = seed

    def where(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._count("closed")

    def _observe(self) -> dict[str, Any]:
        return {
            "who": f"env {self.identity}",
            "episode": self.episode,
            "t": self.t,
            "told": (self.kwargs, self.last_seed),
        }

    def _count(self, name: str) -> None:
        if self.folder is not None:
            with open(self.folder / name, "ab") as file:
                file.write(b".")


class NewEnv(OldEnv):
    """The same with Gymnasium's API: five values, and infos from `reset`. Action "cut" is a time limit."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        self.last_seed = seed
        return super().reset(options=options), {"fresh": True}

    def step(self, action: Any) -> Any:
        obs, reward, is_over, info = super().step(action)
        return obs, reward, is_over, action == "cut", info

    def render(self) -> Any:
        return [self.identity, "no mode"]


class SlowToMake(OldEnv):
    """Waits at a gate before it is made."""

    def __init__(self, path: Path, identity: int = 0) -> None:
        wait_at(path)
        super().__init__(identity)


class NeverMade:
    """Its constructor raises."""

    def __init__(self, identity: int) -> None:
        raise OSError(f"no licence for {identity}")


class OldEnvDeafToClose(OldEnv):
    """Waits at a gate when it is closed."""

    def close(self) -> None:
        wait_at(self.gate)

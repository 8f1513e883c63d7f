"""ALE's own vector env, `ale_py.AtariVectorEnv`, which runs Atari games in its own C++ threads.

    tasks = [AtariVectorTask("pong", {"frameskip": 4})] * 64
    pool = stepmill.Pool(tasks, backend="envpool")

It runs behind the same proxy as EnvPool's pools. This module handles the requirements of its interface:

- Its `send` takes no env ids: it steps the envs that were received last. Here all envs are stepped together, and a step of some
  of them is refused. Any envs can be reset, with a seed for each or without seeds.
- It is made with the NEXT_STEP autoreset mode; the pool's own mode is kept by resets.
- A reset ends before the call returns, so its result is stored here until it is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.envs.gymnasium import pickle_spaces, tree_of
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra

_CHOSEN = frozenset({"num_envs", "batch_size", "autoreset_mode", "game"})
_LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class AtariVectorTask:
    """The env function of every env of `Pool(..., backend="envpool")`: one vector env of ALE has all the envs.

    Attributes:
        game: the name of the ROM, such as "pong" or "ms_pacman".
        kwargs: other arguments of `ale_py.AtariVectorEnv`, without `num_envs`, `batch_size` and `autoreset_mode`.
    """

    game: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        """False: the results of the envs are available together."""
        return False

    def make_pool(self, num_envs: int) -> tuple[AtariVectorDriver, EnvSpec]:
        """Make the vector env.

        Raises:
            MissingExtraError: ale_py is not installed.
            UsageError: the pool chooses one of the arguments.
        """
        chosen = sorted(_CHOSEN & set(self.kwargs))
        if chosen:
            raise UsageError(f"{', '.join(chosen)} of an AtariVectorTask is chosen by the pool; leave it out")
        with needs_extra("ale_py", "atari"):
            vector_env = import_module("ale_py.vector_env")
        envs = vector_env.AtariVectorEnv(self.game, num_envs, **self.kwargs)
        observation, action = envs.single_observation_space, envs.single_action_space
        spec = EnvSpec(
            observation=tree_of(observation, "observation_space"),
            action=tree_of(action, "action_space"),
            metadata={"render_modes": []},
            spaces=pickle_spaces(observation, action, None),
        )
        return AtariVectorDriver(envs), spec

    def __call__(self) -> object:
        """Refuse to make an env, because other backends cannot run the envs of this task.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"ALE's vector env of {self.game!r} is run by its own threads; use backend='envpool'")


class AtariVectorDriver:
    """Drives one vector env for the proxy; see `stepmill.backends.external_pool.ExternalPool` for the methods."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._num_envs = int(envs.num_envs)
        self._done: deque[tuple[Any, ...]] = deque()  # results of resets
        self._is_at_work = False
        self._is_stale = False  # the results of the pending call are to be discarded

    def send(self, servers: NDArray[np.int32], actions: Any) -> None:
        """Begin a step of all envs."""
        if len(servers) != self._num_envs:
            raise UsageError(
                f"ALE's vector env steps all of its {self._num_envs} envs together, but got actions for {len(servers)}; "
                "send to all, or use Gymnasium's Atari envs"
            )
        self._drop_stale()
        order = np.argsort(servers)
        self._envs.send(np.ascontiguousarray(np.asarray(actions)[order]))
        self._is_at_work = True

    def reset(self, orders: Sequence[tuple[int, Any, Any]]) -> None:
        """Reset envs. The results can then be received."""
        if any(options for _, _, options in orders):
            raise UsageError("ALE's vector env takes no reset options; give them to AtariVectorTask instead")
        large = [seed for _, seed, _ in orders if seed is not None and seed > _LARGEST_SEED]
        if large:
            raise UsageError(f"ALE's seeds have 31 bits, and {large[0]} has more; give smaller ones")
        self._drop_stale()
        servers = np.array([server for server, _, _ in orders])
        seeds = np.array([-1 if seed is None else seed for _, seed, _ in orders])
        order = np.argsort(servers)
        obs, info = self._envs.ale.reset(servers[order], seeds[order])
        self._done.append((servers, obs[servers], None, None, None, {key: info[key][servers] for key in _infos(info)}))

    def recv(self) -> tuple[Any, ...]:
        """Return results. Those of resets come first."""
        if self._done:
            return self._done.popleft()
        obs, reward, terminated, truncated, info = self._envs.recv()
        self._is_at_work = False
        return info["env_id"], obs, reward, terminated, truncated, {key: info[key] for key in _infos(info)}

    def env_handle(self, server: int) -> object:
        """Return the object that serves calls for one env, which is the vector env."""
        return self._envs

    def close(self) -> None:
        """Release the vector env, which ends its threads."""
        self._envs = None

    def drop(self) -> None:
        """Discard the pending calls."""
        self._done.clear()
        self._is_stale, self._is_at_work = self._is_at_work, False

    def _drop_stale(self) -> None:
        if self._is_stale:
            self._envs.recv()
            self._is_stale = False


def _infos(info: Mapping[str, Any]) -> list[str]:
    return [key for key, value in info.items() if key != "env_id" and isinstance(value, np.ndarray)]

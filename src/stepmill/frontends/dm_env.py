"""`DmEnvironment`: presents any env that stepmill runs as a `dm_env.Environment`, in its own worker.

    from stepmill.frontends.dm_env import DmEnvironment
    with DmEnvironment(lambda: gymnasium.make("CartPole-v1"), seed=1) as env:
        time_step = env.reset()

The discount is 0 where an episode is terminated and 1 everywhere else, including where it is truncated. A dm_env environment
provides its own discounts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from stepmill.frontends.batch_rows import stack_rows, view_row
from stepmill.frontends.gymnasium.spaces import read_spaces
from stepmill.frontends.pool_options import options_of
from stepmill.pool.pool import Pool
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.options import AutoresetMode, BackendName, OptionKeywords, PoolOptions
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import DictNode, Leaf, Node, TupleNode

with needs_extra("dm_env", "dm-env"):
    import dm_env
    from dm_env import specs

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_DISCOUNT = "discount"


class DmEnvironment(dm_env.Environment):
    """Runs one env as a dm_env environment.

    `step` resets the env and ignores its action if the environment is new, if the last time step was LAST, or if the last
    call raised a fault.

    Args:
        env_fn: a function that makes the env. Its worker calls it. The env has one agent, and comes from Gymnasium,
            dm_env or another library that stepmill supports.
        seed: the seed of the first reset; None does not seed. Later episodes do not seed the env's generator.
        options: how the env is run. The default backend is "process"; "serial" runs the env in the caller's thread. The
            autoreset mode is always DISABLED: `step` and `reset` reset the env as dm_env specifies.
        **keywords: fields of PoolOptions by name, in place of `options` or in addition.

    Raises:
        UsageError: the env has agents, is a vector env, or has a space that no spec can describe.
        EnvError: the constructor raised an exception.
    """

    def __init__(
        self,
        env_fn: Callable[[], object],
        *,
        seed: int | None = None,
        options: PoolOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        fixed = {"autoreset_mode": AutoresetMode.DISABLED, "episode_stats": False}
        chosen = options_of("DmEnvironment", options, keywords, fixed, backend=BackendName.PROCESS)
        self._seed = seed
        self._is_over = True
        self._pool = Pool([env_fn], options=chosen)
        with close_on_error(self._pool.close):
            self._spec = _checked(self._pool.spec)
            observation, action = read_spaces([self._spec], allows_vectors=True)[0]
            self._observation_spec = spec_of(self._spec.observation, observation, "observation")
            self._action_spec = spec_of(self._spec.action, action, "action")
            self._own_discount = dict(self._spec.info.items).get(_DISCOUNT)

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode; return its FIRST time step, which has no reward and no discount."""
        self._is_over = True
        batch = self._pool.reset(seed=self._seed)
        self._seed = None
        self._is_over = False
        return dm_env.restart(view_row(self._spec.observation, batch.obs))

    def step(self, action: Any) -> dm_env.TimeStep:
        """Step the env; return a MID or LAST time step, or a FIRST time step if the last episode is over.

        Args:
            action: a value with the structure of `action_spec()`.

        Raises:
            EnvError, WorkerDied: the env failed. The next `step` or `reset` begins an episode, in a new worker if necessary.
        """
        if self._is_over:
            return self.reset()
        actions = stack_rows(self._spec.action, [action])
        self._is_over = True  # if an error interrupts this step, the next one resets
        self._pool.send(actions)
        batch = self._pool.recv(1)
        self._is_over = bool(batch.terminated[0] or batch.truncated[0])
        return dm_env.TimeStep(
            dm_env.StepType.LAST if self._is_over else dm_env.StepType.MID,
            batch.reward[0],
            self._discount_of(batch),
            view_row(self._spec.observation, batch.obs),
        )

    def _discount_of(self, batch: Batch) -> Any:
        if self._own_discount is not None and "fault" not in batch.info:
            return batch.info[_DISCOUNT][0]
        shape, dtype = self.discount_spec().shape, self.discount_spec().dtype
        return np.full(shape, 0.0 if batch.terminated[0] else 1.0, dtype)[()]

    def observation_spec(self) -> Any:
        """Return the nest of specs of observations."""
        return self._observation_spec

    def action_spec(self) -> Any:
        """Return the nest of specs of actions."""
        return self._action_spec

    def reward_spec(self) -> specs.Array:
        """Return the spec of rewards: a float64 number, unless the env declares another spec."""
        return specs.Array(self._spec.reward.shape, self._spec.reward.dtype, name="reward")

    def discount_spec(self) -> specs.BoundedArray:
        """Return the spec of discounts, from 0 to 1: a float64 number, unless the env declares another spec."""
        own = self._own_discount
        shape, dtype = (own.shape, own.dtype) if isinstance(own, Leaf) else ((), np.dtype(np.float64))
        return specs.BoundedArray(shape, dtype, 0.0, 1.0, name=_DISCOUNT)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env, through wrappers, and return its result."""
        return self._pool.call(name, *args, **kwargs)[0]

    def get_attr(self, name: str) -> Any:
        """Return an attribute of the env, through wrappers."""
        return self._pool.get_attr(name)[0]

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        return self._pool.stats()

    def close(self) -> None:
        """Close the env and end its worker within 2 s; the serial backend has no limit. Idempotent."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self


def _checked(spec: EnvSpec) -> EnvSpec:
    if spec.agents or spec.is_batched or spec.time_step is not None:
        kind = "agents" if spec.agents else "several rows" if spec.is_batched else "time steps of another library"
        raise UsageError(f"the env has {kind}, but a dm_env environment is one env with one agent; use stepmill.Pool")
    return spec


def spec_of(node: Node, space: Any, name: str) -> Any:
    """Return the nest of dm_env specs of a tree, with the bounds of its space.

    Raises:
        UsageError: a part of the space has no fixed size.
    """
    if isinstance(node, DictNode):
        return {key: spec_of(child, space[str(key)], f"{name}/{key}") for key, child in node.items}
    if isinstance(node, TupleNode):
        children = [spec_of(child, space[index], f"{name}/{index}") for index, child in enumerate(node.children)]
        return tuple(children) if node.factory is None else node.factory(*children)
    if not isinstance(node, Leaf):
        raise UsageError(f"{name} is {space}, which has no fixed size, so dm_env has no spec for it; wrap the env")
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return specs.DiscreteArray(int(space.n), dtype=node.dtype, name=name)
    low, high = _bounds_of(space)
    if low is None or (np.isneginf(low).all() and np.isposinf(high).all()):
        return specs.Array(node.shape, node.dtype, name=name)
    return specs.BoundedArray(node.shape, node.dtype, low, high, name=name)


def _bounds_of(space: Any) -> tuple[Any, Any]:
    """Return the least and the greatest value, both inclusive; None for both if the space has no bounds."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else (None, None)

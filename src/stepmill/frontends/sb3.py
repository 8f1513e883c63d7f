"""`SB3VecEnv`: Stable-Baselines3's vector env on top of `Pool`.

    from stepmill.frontends.sb3 import SB3VecEnv
    envs = make_vec_env("CartPole-v1", n_envs=64, vec_env_cls=SB3VecEnv)

There are intended differences from `SubprocVecEnv`. Many envs share a worker. `set_attr` sets an attribute on the
wrapper that has it. An error names the env that failed, hung or died, and `PoolOptions(on_fault=...)` chooses what
happens in this case.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

from stepmill.frontends.batch_rows import infos_and_finals, stack_rows
from stepmill.frontends.env_objects import env_objects
from stepmill.frontends.gymnasium.spaces import SpacePair, check_spaces, read_spaces
from stepmill.frontends.pool_options import options_of
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort, whole_ids
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import EnvError, UsageError, needs_extra, rebuild_error
from stepmill.spec.options import AutoresetMode, BackendName, OptionKeywords, PoolOptions
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import Leaf
from stepmill.worker.calls import has_named

with needs_extra("stable_baselines3", "sb3", ImportError):
    from stable_baselines3.common.env_util import is_wrapped
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn

if TYPE_CHECKING:
    from typing_extensions import Unpack

Actions: TypeAlias = "NDArray[Any] | Sequence[Any] | Mapping[str, Any]"


class NoAttributeError(EnvError, AttributeError):
    """An env has no such attribute. This is also an AttributeError, as SB3's callers expect."""


class SB3VecEnv(VecEnv):
    """Runs many Gymnasium envs for Stable-Baselines3.

    Args:
        env_fns: functions that make the envs. Each runs in the worker that owns its env.
        start_method: "forkserver", "fork" or "spawn", as for `SubprocVecEnv`; None uses the context in `options`.
        options: how the envs are run. The autoreset mode is SAME_STEP, which SB3's algorithms expect.
        **keywords: fields of PoolOptions by name, in place of `options` or in addition.

    Raises:
        UsageError: the envs differ in their spaces, or an option is invalid.
        EnvError: a constructor raised an exception.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        start_method: str | None = None,
        *,
        options: PoolOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        # SB3's Monitor keeps an episode's statistics in the env.
        context = {} if start_method is None else {"context": start_method}
        fixed = {"autoreset_mode": AutoresetMode.SAME_STEP, "episode_stats": False}
        chosen = options_of("SB3VecEnv", options, {**keywords, **context}, fixed)
        self._is_stepping = False
        self._pool = Pool(env_fns, options=chosen)
        self._port = PoolPort(self._pool)
        with close_on_error(self._pool.close):
            pairs = read_spaces(self._port.env_specs)
            if self._pool.spec.is_batched:
                raise UsageError("env_fns make vector envs; give SB3VecEnv functions that make single envs")
            check_spaces(pairs, pairs[0][0], is_same=True)
            spaces = pairs[0]
            if chosen.backend is BackendName.SERIAL:
                spaces = _own_spaces(self.envs, spaces)
            super().__init__(self._pool.num_envs, *spaces)
            self._has_plain_actions = isinstance(self._pool.spec.action, Leaf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pool!r})"

    # ---- stepping and resetting ------------------------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        """Reset all envs. Values given by `seed` and `set_options` are used for one reset.

        Returns:
            observations [N, ...]; the infos are in `reset_infos`.
        """
        self._is_stepping = False
        batch = self._pool.reset(seed=list(self._seeds), options=[each or None for each in self._options])
        infos = infos_and_finals(batch.info)[0]
        self.reset_infos = [dict(infos.get(env_id, {})) for env_id in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        obs: VecEnvObs = batch.obs
        return obs

    def step_async(self, actions: Actions) -> None:
        """Begin to step all envs.

        Args:
            actions: an array [N, ...], or a sequence with one action per env, in the structure of the action space.
        """
        self._port.step_async(self._batched(actions))
        self._is_stepping = True

    def step_wait(self) -> VecEnvStepReturn:
        """Return the results of `step_async`: observations [N, ...], rewards [N] float64, dones [N] bool, N infos."""
        if not self._is_stepping:
            raise UsageError("step_wait() has nothing to wait for; call step_async(actions) first")
        self._is_stepping = False
        return self._as_sb3(self._port.step_wait())

    def step(self, actions: Actions) -> VecEnvStepReturn:
        """Step all envs; see `step_async` and `step_wait`. Hot path."""
        return self._as_sb3(self._port.step_fast(self._batched(actions)))

    def _batched(self, actions: Actions) -> Any:
        """Return the actions as a batch in the structure of the action space."""
        if self._has_plain_actions or isinstance(actions, Mapping):
            return actions
        if len(actions) != self.num_envs:
            raise UsageError(f"got {len(actions)} actions for {self.num_envs} envs; give one for each env")
        return stack_rows(self._pool.spec.action, list(actions))

    def _as_returned(self, batch: Batch) -> VecEnvStepReturn:
        """Return what `stepmill.restore` returns: the results of the last step before the envs were saved."""
        self._is_stepping = bool(self._port.num_pending)
        return self._as_sb3(batch)

    def _own_names(self) -> tuple[str, ...]:
        return "reset_infos", "_seeds", "_options"  # the last two are used by the next reset

    def _as_sb3(self, result: Iterable[Any]) -> VecEnvStepReturn:
        obs, reward, terminated, truncated, info = result
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        newest, finals = infos_and_finals(info)
        for row, own in newest.items():
            if done[row]:
                self.reset_infos[row] = dict(own)
            else:
                infos[row] = {**own, "TimeLimit.truncated": False}
        for row, (final_obs, final_info) in finals.items():
            is_truncated = bool(truncated[row] and not terminated[row])
            infos[row] = {**final_info, "TimeLimit.truncated": is_truncated, "terminal_observation": final_obs}
        return obs, reward, done, infos

    # ---- everything slow -------------------------------------------------------------------------------------------

    @property
    def envs(self) -> tuple[Any, ...]:
        """The N env objects, on the serial backend only.

        Raises:
            AttributeError: the envs are objects in workers.
        """
        instead = "get_attr(name) and set_attr(name, value) access their attributes, env_method(name, ...) calls their methods"
        return env_objects(self, self._pool, instead)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the envs at `indices`, through wrappers, and return one result per env."""
        return self._call(indices, _call_method, method_name, method_args, method_kwargs)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of the envs at `indices`, through wrappers."""
        return self._call(indices, _read_attribute, attr_name)

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all envs, or wrappers of them, have an attribute. Its value stays in the worker."""
        return all(self._pool.get_attr(partial(has_named, attr_name)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the envs at `indices` to one value, on the wrapper that has it. Rebuilt envs get it, too."""
        ids = self._ids(indices)
        self._pool.set_attr(attr_name, [value] * len(ids), env_ids=ids)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        """Return whether each of the envs at `indices` has this wrapper."""
        return list(self._pool.get_attr(partial(is_wrapped, wrapper_class=wrapper_class), env_ids=self._ids(indices)))

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Return a frame [height, width, 3] uint8 of every env; None for each if render_mode is not "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"render_mode={self.render_mode!r} gives no images; make the envs with render_mode='rgb_array'",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return list(self._pool.render())

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        return self._pool.stats()

    def close(self) -> None:
        """Close the envs and end the workers within 2 s; the serial backend has no limit. Idempotent."""
        self._pool.close()

    def _call(self, indices: VecEnvIndices, function: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            return list(self._pool.call(function, *args, env_ids=self._ids(indices)))
        except EnvError as exc:
            if exc.error_type.rpartition(".")[2] != "AttributeError":
                raise
            raise rebuild_error(NoAttributeError, exc.message, exc.__dict__) from exc

    def _ids(self, indices: VecEnvIndices) -> list[int]:
        return [range(self.num_envs)[index] for index in whole_ids(self._get_indices(indices))]


def _own_spaces(envs: Sequence[Any], spaces: SpacePair) -> SpacePair:
    """Return env 0's own space objects, as in DummyVecEnv: SB3 seeds the action space, from which envs may sample."""
    names = ("observation_space", "action_space")
    own = [getattr(envs[0], name, space) for name, space in zip(names, spaces, strict=True)]
    return (own[0], own[1]) if tuple(own) == spaces else spaces  # envs of other APIs have no Gymnasium spaces


def _call_method(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return env.get_wrapper_attr(name)(*args, **kwargs)


def _read_attribute(env: Any, name: str) -> Any:
    return env.get_wrapper_attr(name)

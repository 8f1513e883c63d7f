"""`MultiThreadedEnv` and `MultiThreadedEnvWrapper`: TorchRL's classes for EnvPool, here for any backend.

There are differences from TorchRL 0.14:

- Any subset of envs can be reset, and asynchronous pools work.
- Observations may be nested to any depth.
- An episode that ended is reset once, and the data contain no empty steps.
- Returned tensors are never modified, and envs that are not reset keep their flags.
- `info_specs` adds infos.
- All keyword arguments work, including `frame_skip`.
- Seeds can be given per env and per reset.
- Actions are cast to EnvPool's dtypes.

Rewards and flags have the shape [N], as in TorchRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torchrl.envs
from tensordict import TensorDictBase
from torchrl._utils import logger

from stepmill.envs.envpool import EnvPoolTask, GivenEnvPool, import_envpool
from stepmill.frontends.torchrl.engine import Engine, torchrl_options, with_deadlines
from stepmill.frontends.torchrl.env import StepmillEnv, opener_of_existing_pool, replace_class
from stepmill.frontends.torchrl.errors import MissingEnvPoolError
from stepmill.frontends.torchrl.makers import BoundMaker, EnvMakers, Kwargs
from stepmill.frontends.torchrl.views import FanOut
from stepmill.pool.pool import Pool
from stepmill.pool.port import Seed
from stepmill.spec.errors import ArgumentTypeError, MissingExtraError
from stepmill.spec.options import BackendName, PoolOptions, pop_options

_ABSENT: Any = object()


class _Lib:
    """A property of the class instead of its objects."""

    def __get__(self, instance: object, owner: type) -> Any:
        return _envpool()


class MultiThreadedEnvWrapper(StepmillEnv):
    """Presents an existing pool as one TorchRL env.

    Args:
        env: an EnvPool pool with env_type "gymnasium" or "gym", synchronous or not; or a `stepmill.Pool` of any backend with
            `autoreset_mode="Disabled"`. Nothing else may use it meanwhile.
        categorical_action_encoding: True makes actions of Discrete spaces numbers, as TorchRL always does; False makes them one-hot.
        frame_skip, **base: as for `StepmillEnv`.
        disable_env_checker: accepted and ignored, because no checker of Gymnasium runs.
    Raises:
        TypeError: env is missing, or has another type.
        ImportError: EnvPool is not installed.
    """

    _flag_tail: tuple[int, ...] = ()
    lib = _Lib()

    def __init__(
        self,
        env: Any = None,
        *,
        categorical_action_encoding: bool = True,
        disable_env_checker: bool | None = None,
        frame_skip: int = 1,
        **base: Any,
    ) -> None:
        if env is None:
            raise ArgumentTypeError("Could not find environment key 'env' in kwargs.")
        self._set_up(
            Engine(_opener_of(env, has_infos=bool(base.get("info_specs"))), frame_skip=frame_skip),
            is_categorical=categorical_action_encoding,
            **base,
        )

    @property
    def obs(self) -> TensorDictBase:
        """The newest observation of each env, [N, ...]; it is zero for envs that have not been reset."""
        return self._to_tensordict(self._observation_tensors(self._engine.port.observe()))

    @property
    def _env(self) -> Any:
        """The EnvPool pool. Envs of other backends have none."""
        if not self._engine.is_envpool:
            raise AttributeError("_env")
        return self._engine.pool.get_attr(attrgetter("pool"), env_ids=[0])[0]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the EnvPool pool; with another backend, return the attribute of all envs."""
        found = super().__getattr__(name)
        return getattr(self._env, name, found) if isinstance(found, FanOut) and self._engine.is_envpool else found

    @property
    def frame_skip(self) -> int:
        """The number of times that a step applies an action."""
        return self._engine.frame_skip

    def _set_seed(self, seed: Seed) -> None:
        if seed is not None and self._engine.is_envpool and type(self) is MultiThreadedEnvWrapper:
            logger.info(
                "MultiThreadedEnvWrapper ignores seed %s: an EnvPool pool has its seed from envpool.make(..., seed=...). "
                "Use MultiThreadedEnv, or reset(seed=...) of all envs, which make a new pool with the seed.",
                seed,
            )
            return
        self._engine.set_seed(seed)


class MultiThreadedEnv(MultiThreadedEnvWrapper):
    """Makes N envs by name, EnvPool's or on other backends Gymnasium's, and presents them as one TorchRL env.

    Args:
        num_workers: N.
        env_name: an EnvPool task, whose prefix "ALE/" is removed. With another backend, an id of Gymnasium or a function
            that makes an env.
        create_env_kwargs: arguments of `envpool.make`, `gymnasium.make`, or the function. They are not changed. See `update_kwargs`.
        options: options of the pool. The backend is "envpool" by default; "thread", "process" and "serial" run Python envs.
        **kwargs: fields of PoolOptions by name, and the arguments of `MultiThreadedEnvWrapper`: device, frame_skip and
            others. EnvPool's own frame skip of Atari tasks is `create_env_kwargs={"frame_skip": ...}`.
        disable_env_checker: an argument of `gymnasium.make`; EnvPool has no checker.
    Raises:
        TypeError: num_workers or env_name is missing.
        ImportError: EnvPool is not installed.
        UsageError: EnvPool has no such task.
    """

    def __init__(
        self,
        num_workers: int = _ABSENT,
        env_name: str | Callable[..., object] = _ABSENT,
        *,
        create_env_kwargs: Kwargs | Sequence[Kwargs] | None = None,
        options: PoolOptions | None = None,
        disable_env_checker: bool | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("num_workers", num_workers), ("env_name", env_name)):
            if value is _ABSENT:
                raise ArgumentTypeError(f"Expected '{name}' to be part of kwargs")
        options = torchrl_options(options, pop_options(kwargs), backend=BackendName.ENVPOOL)
        is_envpool = options.backend is BackendName.ENVPOOL
        if is_envpool:
            _envpool()
            env_name = str(env_name).removeprefix("ALE/")
            bind = partial(_envpool_maker, has_infos=bool(kwargs.get("info_specs")))
        else:
            bind = partial(_gymnasium_maker, disable_env_checker=disable_env_checker)
        self._env_name = env_name if isinstance(env_name, str) else getattr(env_name, "__name__", repr(env_name))
        makers = EnvMakers([env_name] * num_workers, create_env_kwargs, bind=bind, is_uniform=is_envpool)
        options = with_deadlines(options, makers.functions())

        def opener() -> Pool:
            return Pool(makers.functions(), options=options)

        engine = Engine(opener, frame_skip=kwargs.pop("frame_skip", 1), makers=makers)
        is_categorical = kwargs.pop("categorical_action_encoding", True)
        self._set_up(engine, is_categorical=is_categorical, **kwargs)

    @property
    def env_name(self) -> str:
        """The name of the task, of Gymnasium's env, or of the function."""
        return self._env_name

    @property
    def create_env_kwargs(self) -> Any:
        """The keyword arguments of the envs: a dict, or a list with a dict per env if they differ."""
        kwargs = super().create_env_kwargs
        return kwargs[0] if all(own == kwargs[0] for own in kwargs) else kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self.env_name}, num_workers={self.num_workers}, device={self.device})"


replace_class(MultiThreadedEnvWrapper, torchrl.envs.MultiThreadedEnvWrapper)
replace_class(MultiThreadedEnv, torchrl.envs.MultiThreadedEnv)


def _envpool_maker(env_name: str, kwargs: Kwargs, *, has_infos: bool) -> Callable[[], object]:
    return EnvPoolTask(env_name, {"max_num_players": 1, **kwargs}, has_infos=has_infos)


def _gymnasium_maker(
    env_name: str | Callable[..., object], kwargs: Kwargs, *, disable_env_checker: bool | None
) -> Callable[[], object]:
    if callable(env_name):
        return BoundMaker(env_name, kwargs)
    import gymnasium

    return BoundMaker(partial(gymnasium.make, env_name, disable_env_checker=disable_env_checker), kwargs)


def _envpool() -> Any:
    try:
        return import_envpool()
    except MissingExtraError as exc:
        raise MissingEnvPoolError from exc


def _opener_of(env: Any, *, has_infos: bool) -> Callable[[], Pool]:
    if isinstance(env, Pool):
        return opener_of_existing_pool(env)
    envpool = _envpool()
    if not isinstance(env, envpool.python.envpool.EnvPoolMixin):
        raise ArgumentTypeError("env is not of type 'envpool.python.envpool.EnvPoolMixin'.")
    maker = GivenEnvPool(env, has_infos=has_infos)
    return partial(Pool, [maker] * maker.num_envs, options=torchrl_options(None, {"backend": "envpool"}))

"""`StepmillEnv`: a pool of envs as one TorchRL env of batch size [N]."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl._utils import seed_generator
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from stepmill.frontends.overrides import protected_methods_missing_in, refuse_overrides
from stepmill.frontends.torchrl.engine import Engine, Rows, torchrl_options, with_deadlines
from stepmill.frontends.torchrl.makers import EnvMakers, Kwargs
from stepmill.frontends.torchrl.parallel_arguments import ParallelKeywords, pop_parallel_arguments
from stepmill.frontends.torchrl.specs import ActionReader, action_spec, observation_packer, observation_spec, with_infos
from stepmill.frontends.torchrl.views import EnvView, PoolEnv
from stepmill.pool.pool import Pool
from stepmill.pool.port import Seed, checked_fns
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import ArgumentTypeError, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.options import OptionKeywords, PoolOptions, check_option_names, pop_options
from stepmill.spec.stats import PoolStats

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

# TorchRL makes its tensordicts with this private constructor; the public one is used if it is removed.
_new_tensordict = getattr(TensorDict, "_new_unsafe", TensorDict)

EnvFns = Sequence[Callable[[], object]]


class EnvKeywords(OptionKeywords, ParallelKeywords, total=False):
    """Keyword arguments in addition to the fields of PoolOptions and the arguments of ParallelEnv.

    Attributes:
        device, allow_done_after_reset, run_type_checks: those of EnvBase. The device is "cpu" by default.
        info_specs: {key: spec} of single envs; the newest infos of each env are added under ("info", key).
        create_env_kwargs: keyword arguments of the env functions, one mapping for all or one per env; each env receives a
            deep copy. See `update_kwargs`.
    """

    device: Any
    allow_done_after_reset: bool
    run_type_checks: bool
    info_specs: Mapping[str, Any] | None
    create_env_kwargs: Kwargs | Sequence[Kwargs] | None


class StepmillEnv(PoolEnv):
    """Many envs as one TorchRL env, run by a pool on any backend.

    An observation space that is one leaf has the key "observation"; the keys of Dict spaces are kept. Actions have the key
    "action". Rewards have the dtype that is torch's default when the env is made. With `device="cpu"`, large observations are leased by the pool without a copy (see
    `stepmill.Batch`), and stay valid while they are referenced.

    `reset(td)` with a mask "_reset" resets the envs that the mask selects. The others keep their observations and
    flags. (TorchRL's EnvPool wrapper clears the flags, and overwrites terminal observations that it has returned.) The
    first `step` of envs that have not been reset resets them first. A step of an env that is done raises `UsageError`.

    Attributes that this class does not have are read from the envs: see `FanOut`.

    Args:
        env_fns: functions that make envs: single envs of TorchRL, envs of Gymnasium, or others that stepmill supports; or a
            `stepmill.Pool` with `autoreset_mode="Disabled"`. TorchRL's envs keep their specs.
        categorical_action_encoding: whether actions of Discrete spaces are numbers. Otherwise they are one-hot.
        frame_skip: how many times each action is applied, unless the episode ends before. The step has the last
            observation and the sum of the rewards.
        options: options of the pool, without automatic resets.
        **keywords: fields of PoolOptions by name, which take precedence over `options`; the keywords of `EnvKeywords`; and
            arguments of ParallelEnv, see `parallel_arguments`.
    Raises:
        UsageError: a space has parts without a fixed size or keys that TorchRL reserves, or an argument of ParallelEnv is
            not supported.
        EnvError: a constructor raised an exception.
    """

    NOT_CALLED: ClassVar[dict[str, str]] = {}
    _has_frame_skip = True  # otherwise TorchRL adds a transform for it
    _flag_tail: tuple[int, ...] = (1,)  # rewards and flags are [N, *_flag_tail]

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Refuse the arguments of TorchRL's ParallelEnv, and subclasses that override methods which are not called, by name."""
        is_own = cls.__init__ is StepmillEnv.__init__
        if is_own and (len(args) > 1 or "create_env_fn" in keywords):
            raise ArgumentTypeError(
                f"{cls.__name__} takes a list of env functions: {cls.__name__}([create_env_fn] * num_workers); "
                "stepmill.frontends.torchrl.ParallelEnv has TorchRL's arguments"
            )
        refuse_overrides(cls)
        made: Self = super().__new__(cls, *args, **keywords)
        return made

    def __init__(
        self,
        env_fns: EnvFns | Pool,
        *,
        categorical_action_encoding: bool = False,
        frame_skip: int = 1,
        options: PoolOptions | None = None,
        **keywords: Unpack[EnvKeywords],
    ) -> None:
        base: dict[str, Any] = {**keywords}
        pop_parallel_arguments(base, 0 if isinstance(env_fns, Pool) else len(checked_fns(env_fns)))
        pool_options = pop_options(base)
        known = EnvKeywords.__annotations__.keys() | signature(EnvBase.__init__).parameters.keys()
        check_option_names({name: base[name] for name in sorted(base.keys() - known)})
        kwargs = base.pop("create_env_kwargs", None)
        if isinstance(env_fns, Pool):
            if pool_options:
                raise UsageError(f"{', '.join(pool_options)}: this pool exists already; give options to stepmill.Pool")
            if kwargs:
                raise UsageError(
                    "create_env_kwargs are arguments of env functions, and this pool has made its envs; leave them out"
                )
            opener, makers = opener_of_existing_pool(env_fns), None
        else:
            env_makers = makers = EnvMakers(checked_fns(env_fns), kwargs)
            chosen = with_deadlines(torchrl_options(options, pool_options), env_makers.functions())

            def opener() -> Pool:
                return Pool(env_makers.functions(), options=chosen)

        self._set_up(
            Engine(opener, frame_skip=frame_skip, makers=makers), is_categorical=categorical_action_encoding, **base
        )

    def _set_up(
        self,
        engine: Engine,
        *,
        is_categorical: bool,
        device: Any = "cpu",
        info_specs: Mapping[str, Any] | None = None,
        **base: Any,
    ) -> None:
        with close_on_error(engine.close):
            super().__init__(device=device, batch_size=torch.Size([engine.num_envs]), **base)
            self._engine, self._env_ids = engine, range(engine.num_envs)
            observation, action = engine.spaces[0]
            self.action_spec = action_spec(
                [space for _, space in engine.spaces], self.device, is_categorical=is_categorical
            )
            self.observation_spec = with_infos(
                observation_spec([space for space, _ in engine.spaces], self.device), info_specs or {}, engine.num_envs
            )
            engine.infos = {key: spec.zero((engine.num_envs,)).numpy() for key, spec in (info_specs or {}).items()}
            self._make_flag_specs(engine.num_envs)
            self._reader = ActionReader(action, is_categorical=is_categorical)
            self._pack_obs = observation_packer(observation)
        self._is_on_cpu = self.device is not None and self.device.type == "cpu"
        self.is_closed = False

    def _make_flag_specs(self, num_envs: int) -> None:
        shape = (num_envs, *self._flag_tail)
        self._reward_dtype = torch.get_default_dtype()  # as TorchRL's envs
        reward = Unbounded(shape, device=self.device, dtype=self._reward_dtype)
        self.reward_spec = Composite(reward=reward, shape=(num_envs,), device=self.device)
        flag = Categorical(2, shape=shape, dtype=torch.bool, device=self.device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(num_envs,), device=self.device
        )

    # ---- methods that TorchRL calls ----------------------------------------------------------------------------------

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: Seed = None,
        options: Mapping[str, Any] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        if kwargs:
            raise ArgumentTypeError(f"reset() got {sorted(kwargs)}; an env's reset takes seed and options")
        mask = self._read_mask(tensordict, "_reset")
        if list_of_kwargs is None:
            obs = self._engine.reset(mask, seed, options)
        else:
            obs = self._engine.reset_each(mask, list_of_kwargs)
        self.is_closed = False
        return self._to_tensordict({**self._observation_tensors(obs), **self._flag_tensors()})

    def _as_returned(self, batch: Batch) -> TensorDictBase:
        """Return what `stepmill.restore` returns: the newest observations and flags, as `reset` does."""
        self._engine.mark_restored(batch)
        return self._to_tensordict({**self._observation_tensors(batch.obs), **self._flag_tensors()})

    def _own_names(self) -> tuple[str, ...]:
        """Return the attributes that `stepmill.save` saves beside the pool."""
        return ("_infos_and_seeds",)

    @property
    def _infos_and_seeds(self) -> tuple[dict[str, Any], dict[int, int]]:
        return {**self._engine.infos}, {**self._engine.seeds}

    @_infos_and_seeds.setter
    def _infos_and_seeds(self, saved: tuple[dict[str, Any], dict[int, int]]) -> None:
        self._engine.infos, self._engine.seeds = ({**part} for part in saved)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step the envs, and return the tensordict with "next" in it, like `EnvBase.step` without checks that cannot fail here.

        Raises:
            UsageError: an env is done, or the action does not fit.
        """
        keys = tensordict.keys()
        if self.run_type_checks or "_step" in keys or "next" in keys:
            stepped: TensorDictBase = super().step(tensordict)
            return stepped
        self._assert_tensordict_shape(tensordict)
        return tensordict.set("next", self._step(tensordict))

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step the envs and reset those that are done; return (the result of the step, the root of the next step).

        The first has the last observations and the flags, and is never modified; in the second all flags are False.
        """
        is_plain = self._post_step_mdp_hooks is None and "_compiled_step_and_maybe_reset" not in self.__dict__
        if not is_plain or tensordict.device != self.device:
            results: tuple[TensorDictBase, TensorDictBase] = super().step_and_maybe_reset(tensordict)
            return results
        self._engine.begins_resets = True  # resets run while this thread makes the tensors of the step
        try:
            tensordict = self.step(tensordict)
        finally:
            self._engine.begins_resets = False
        obs = self._engine.wait_resets()
        if obs is None:
            return tensordict, self._step_mdp(tensordict)
        after_reset = self._observation_tensors(obs)
        for key in ("done", "terminated", "truncated"):  # the envs that were done have been reset
            after_reset[key] = torch.zeros((self._engine.num_envs, *self._flag_tail), dtype=torch.bool)
        return tensordict, self._step_mdp(tensordict.copy().set("next", self._to_tensordict(after_reset)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask = self._read_mask(tensordict, "_step")
        rows = self._engine.step(self._reader.read(tensordict), mask)
        return self._to_tensordict(self._step_tensors(rows))

    def _reset_proc_data(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # TorchRL fills keys that the caller's tensordict lacks with zeros for envs that are not reset. They keep their values here.
        if tensordict is not None and any(tensordict.get(key, None) is not None for key in self.reset_keys):
            for key, value in tensordict_reset.items(True, True):
                if tensordict.get(key, None) is None:
                    tensordict.set(key, value.clone())
        merged: TensorDictBase = super()._reset_proc_data(tensordict, tensordict_reset)
        return merged

    def _set_seed(self, seed: int | None) -> None:
        self._engine.set_seed(seed)

    def set_seed(self, seed: Any = None, static_seed: bool = False) -> int | None:
        """Set the seeds of the envs' next resets, and return a seed for another env.

        Envs are not rebuilt, except EnvPool's pools, which get seeds only when they are made: the next reset makes a new pool
        and resets all envs.

        Args:
            seed: a number s, which gives env i the seed s + i; or a list with one seed per env.
            static_seed: True returns the seed itself.
        """
        self._set_seed(seed)
        if isinstance(seed, Mapping):
            seed = list(seed.values())
        seeds = [own for own in (seed if isinstance(seed, (Sequence, np.ndarray)) else [seed]) if own is not None]
        if not seeds:
            return None
        next_seed: int = seeds[-1] if static_seed else seed_generator(seeds[-1])
        return next_seed

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def _observation_tensors(self, obs: Any, ids: Any = None) -> dict[str, Any]:
        packed = self._pack_obs(obs)
        infos = self._engine.infos
        if infos:
            packed["info"] = {
                key: torch.from_numpy(column if ids is None else column[ids]) for key, column in infos.items()
            }
        return packed

    def _step_tensors(self, rows: Rows, ids: Any = None) -> dict[str, Any]:
        obs, reward, terminated, truncated = rows
        shape = (len(reward), *self._flag_tail)
        packed = self._observation_tensors(obs, ids)
        is_terminated = torch.from_numpy(terminated).view(shape)
        is_truncated = torch.from_numpy(truncated).view(shape)
        packed["reward"] = torch.from_numpy(reward).to(self._reward_dtype, copy=True).view(shape)
        return packed | {"done": is_terminated | is_truncated, "terminated": is_terminated, "truncated": is_truncated}

    def _flag_tensors(self) -> dict[str, Any]:
        terminated, truncated = self._engine.terminated, self._engine.truncated
        shape = (len(terminated), *self._flag_tail)
        flags = {"done": terminated | truncated, "terminated": terminated.copy(), "truncated": truncated.copy()}
        return {key: torch.from_numpy(flag).view(shape) for key, flag in flags.items()}

    def _to_tensordict(self, tensors: dict[str, Any], batch_size: torch.Size | None = None) -> TensorDictBase:
        size = self.batch_size if batch_size is None else batch_size
        # Shapes and devices are known to be right: 5 µs instead of 50.
        make = _new_tensordict if self._is_on_cpu else TensorDict
        made: TensorDictBase = make(tensors, batch_size=size, device=self.device)
        return made

    def _read_mask(self, tensordict: TensorDictBase | None, key: str) -> NDArray[np.bool_] | None:
        mask = None if tensordict is None else tensordict.get(key, None)
        if mask is None:
            return None
        rows: NDArray[np.bool_] = mask.reshape(-1).cpu().numpy()
        return None if rows.all() else rows

    # ---- attributes and views of envs --------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of envs; TorchRL has a worker for each."""
        return self._engine.num_envs

    @property
    def pool(self) -> Pool:
        """The pool that runs the envs.

        Raises:
            UsageError: the env is closed.
        """
        return self._engine.pool

    @property
    def create_env_kwargs(self) -> Any:
        """The keyword arguments of the env functions: a new list with a dict per env."""
        if self._engine.makers is None:
            raise AttributeError("create_env_kwargs")  # hasattr() is False
        return self._engine.makers.kwargs

    def start(self) -> None:
        """Start the workers after `close` or `update_kwargs`; otherwise they have been started with the env."""
        self._engine.start()
        self.is_closed = False

    def configure_parallel(self, **keywords: Any) -> StepmillEnv:
        """Refuse: the workers start when the env is made, so ParallelEnv's arguments are keywords of the constructor."""
        raise UsageError(
            f"the workers have been started; give {', '.join(keywords)} to {type(self).__name__} as keywords"
        )

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        """Return a view of some envs, which is a TorchRL env; its steps and resets are those of this env."""
        ids = np.atleast_1d(np.arange(self.num_workers)[index if isinstance(index, (int, slice)) else list(index)])
        return EnvView(self, ids)

    # ---- state and arguments of envs ---------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """Like `PoolEnv.state_dict`; the state of closed envs is that of new envs."""
        # A Collector whose frames are used up closes its env, and is saved afterwards.
        if self.is_closed and not (args or kwargs):
            warn(
                "state_dict() of closed envs is that of new envs; call it before close(), or before a Collector's last batch"
            )
            self.start()
        return super().state_dict(*args, **kwargs)

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Change the keyword arguments of the env functions; the next reset of all envs closes the envs and makes new ones.

        Until then the present envs are used, including by resets with a mask. (TorchRL uses them until it is closed.)

        Args:
            kwargs: arguments to add, or to replace those with the same names; one mapping for all envs, or one per env.
        Raises:
            UsageError: the number of mappings is wrong, or the env was made of a pool. The reset raises it if the new envs have
                other spaces; the env is then closed, and another `update_kwargs` and a reset open it again.
        """
        self._engine.update_kwargs(kwargs)

    def stats(self) -> PoolStats:
        """Return the timing statistics of the pool; see `stepmill.Pool.stats`."""
        return self._engine.pool.stats()

    # ---- devices, close ----------------------------------------------------------------------------------------------

    def to(self, device: Any) -> StepmillEnv:
        """Set the device of specs and data; the envs still run on the CPU."""
        moved: StepmillEnv = super().to(device)
        moved._is_on_cpu = moved.device is not None and moved.device.type == "cpu"
        return moved

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the envs and end their workers, in at most 2 s. Idempotent; `reset` opens the env again."""
        self.is_closed = True
        self._engine.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_workers={self.num_workers}, device={self.device})"


def replace_class(ours: type[StepmillEnv], theirs: Any) -> None:
    """Make our class a virtual subclass of TorchRL's, and refuse overrides of methods that only TorchRL's calls."""
    theirs.register(ours)
    advice = "override _reset or _step, or use a transform of TorchRL or a wrapper of the single envs"
    ours.NOT_CALLED = dict.fromkeys(protected_methods_missing_in(ours, theirs), advice)


def opener_of_existing_pool(pool: Pool) -> Callable[[], Pool]:
    """Return a function that returns a pool that the user has made, once."""
    pools = [pool]

    def open_pool() -> Pool:
        if not pools:
            raise UsageError("the pool that was given to this env is closed; make a new pool and a new env")
        return pools.pop()

    return open_pool

"""`Manager`, the base class of all managers: launch and close, resets, steps, seeds, and questions about the envs.

step ─► results ─► _collect_timesteps ─► timesteps; envs whose episode ended begin their reset
                     ├► abnormal timestep ─► ERROR
                     └► an env raised ─► `_fail_step`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from stepmill.envs.di_engine import as_ding_env, timestep_class
from stepmill.envs.di_engine_managed import is_abnormal
from stepmill.frontends.di_engine import config as settings
from stepmill.frontends.di_engine.env_calls import EnvCalls
from stepmill.frontends.di_engine.env_lifecycle import EnvState
from stepmill.frontends.di_engine.errors import ManagerUsageError, ResetParamError
from stepmill.frontends.di_engine.pool_client import Command, PoolClient, is_torn
from stepmill.frontends.overrides import refuse_overrides
from stepmill.pool.port import whole_ids
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import BadOutput, EnvError, StepmillError
from stepmill.spec.options import OptionKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

ResetParam = Mapping[int, "dict[str, Any] | None"]

logger = logging.getLogger("stepmill.di_engine")


class Manager(EnvCalls):
    """Runs many envs, each with an env_id, and with DI-engine's states and policies.

    No env is built in this process for its spaces. They come from the workers, which `launch` or the first use of a
    space starts. `env_ref` builds an env when it is first used.

    Args:
        env_fn: functions that make the envs of DI-engine or Gymnasium. Each runs in the worker that owns its env.
        cfg: the settings. Missing settings have the class's defaults.
        **keywords: fields of PoolOptions by name. Fields that are also settings (`step_timeout_s`, `copy`) take
            precedence over `cfg`. Fields that a manager sets itself are refused.
    """

    config: dict[str, Any] = settings.BASE
    _marks_abnormal = False  # whether an abnormal timestep sets its env to ERROR

    def __init__(
        self,
        env_fn: Sequence[Callable[[], Any]],
        cfg: Mapping[str, Any] | None = settings.EMPTY,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        refuse_overrides(type(self))
        chosen = settings.with_defaults({**(cfg or {}), **settings.settings_in(keywords)}, self.config)
        super().__init__(env_fn, chosen, settings.options_in(keywords))
        self._reference: Any = None
        if chosen.retry_type not in ("reset", "renew"):
            raise ManagerUsageError(f"retry_type={chosen.retry_type!r} is not one of 'reset', 'renew'")

    @classmethod
    def default_config(cls) -> Any:
        """Return a deep copy of the class's settings, an EasyDict if that is installed."""
        return settings.default_config(cls.config, cls.__name__)

    # ---- launch, resets, close ---------------------------------------------------------------------------------------

    def launch(self, reset_param: ResetParam | None = None) -> None:
        """Start the envs and reset them all.

        Args:
            reset_param: for each env, keyword arguments of its `reset`.
        Raises:
            AssertionError: the manager is launched already, or reset_param does not have one entry per env.
            RuntimeError: an env could not be reset in `max_retry` attempts; the manager is closed.
            EnvError: a constructor raised an exception.
        """
        if not self._closed:
            raise ManagerUsageError("please first close the env manager")
        if reset_param is not None and len(reset_param) != self._env_num:
            raise ManagerUsageError(
                f"reset_param has {len(reset_param)} entries for {self._env_num} envs; give one for each"
            )
        self._check_reset_param(reset_param)
        with close_on_error(self.close):
            self._create_state()
            self.reset(reset_param)

    def _create_state(self) -> None:
        """Start the envs, and clear the data of the last launch. A subclass may extend it, as in DI-engine."""
        client = self._start()
        self._clear_progress()
        self._env_states.close()
        self._open(client)

    def reset(self, reset_param: ResetParam | None = None) -> None:
        """Reset all envs, or some, and wait until their episodes have begun; `ready_obs` has the first observations.

        Args:
            reset_param: by env_id, keyword arguments of the env's `reset`, or None without arguments. They are stored for its
                automatic resets. If one of these envs executes a step, the step's result is dropped.
        Raises:
            AssertionError: the manager is closed, or a value is neither None nor a dict.
            KeyError: there is no env of that number.
            RuntimeError: as for `launch`.
        """
        self._check_closed()
        self._reset_param.update(self._check_reset_param(reset_param))
        env_ids = list(range(self._env_num)) if reset_param is None else list(reset_param)
        env_ids = [env_id for env_id in env_ids if not self._skips_reset(env_id)]
        wanted = set(env_ids)
        self._wait_resets(wanted)
        for env_id in env_ids:
            self._attempts.pop(env_id, None)
            self._begin_reset(env_id)
        self._wait_resets(wanted)

    def _wait_resets(self, wanted: set[int]) -> None:
        self._process_replies(
            lambda: sum(self._env_states[env_id] is EnvState.RESET for env_id in wanted),
            text="VEC_ENV_MANAGER: not all the envs finish resetting, sleep %d times",
        )

    def _skips_reset(self, env_id: int) -> bool:
        """Whether `reset` leaves this env alone: the base managers do while a replay of its episode is saved."""
        return False

    def _check_reset_param(self, reset_param: ResetParam | None) -> dict[int, dict[str, Any] | None]:
        param = (
            {} if reset_param is None else dict(reset_param.items())
        )  # a list raises AttributeError, as in DI-engine
        self._check_ids(param)
        for env_id, kwargs in param.items():
            if kwargs is not None and not isinstance(kwargs, dict):
                raise ResetParamError(
                    f"reset_param of env {env_id} is a {type(kwargs)}; give a dict of keyword arguments, or None"
                )
        return param

    def close(self) -> None:
        """End the envs, in at most two seconds. Idempotent; the manager can be launched again."""
        self._closed = True
        client, self._client = self._client, None
        self._env_states.close()
        self._offered_ids = None
        self._results.clear()
        self._retry_at.clear()
        if client is not None:
            client.close()

    def _open_client(self) -> PoolClient:
        self._check_closed()  # before a launch too, although spaces may have started the workers
        return super()._open_client()

    # ---- seeds, replays ----------------------------------------------------------------------------------------------

    def seed(self, seed: Mapping[int, int] | list[int] | int, dynamic_seed: bool | None = None) -> None:
        """Set seeds, which are sent once, with the next reset of each env; an env that is rebuilt gets its seed again.

        Args:
            seed: see `seeds_by_env`. It is copied and not changed.
            dynamic_seed: the second argument of the env's own `seed`, unless it is None.
        Raises:
            AssertionError: a list of another length.
            TypeError: another type.
        """
        given = settings.seeds_by_env(seed, self._env_num)
        self._env_seed.update(given)
        self._env_dynamic_seed = dynamic_seed
        self._space_seed = given.get(0)
        self._seed_action_space()

    # ---- questions about the envs ------------------------------------------------------------------------------------

    @property
    def env_ref(self) -> Any:
        """An env of the first env_fn. It is built in this process on first use."""
        if self.__dict__.get("_reference") is None:
            self._reference = as_ding_env(self._env_fn[0]())
        return self._reference

    _env_ref = env_ref

    @property
    def _waiting_env(self) -> dict[str, frozenset[int]]:
        """The envs that execute an action, as DI-engine's attribute has them."""
        return {"step": frozenset(self._unreturned_steps())}

    @property
    def ready_env(self) -> list[int]:
        """Envs that need an action."""
        self._handle_ready_replies()
        return self._known_ready_ids()

    def _known_ready_ids(self) -> list[int]:
        waiting = self._unreturned_steps()
        return [env_id for env_id in self._env_states.ids_in(EnvState.RUN) if env_id not in waiting]

    @property
    def active_env(self) -> list[int]:
        """Envs in an episode, whether or not they execute an action."""
        self._handle_ready_replies()
        return self._env_states.ids_in(EnvState.RUN)

    @property
    def ready_obs_id(self) -> list[int]:
        """Envs that need an action. The first value after `ready_obs` has its envs and order; others are current."""
        ids, self._offered_ids = self._offered_ids, None
        return self.ready_env if ids is None else ids

    @property
    def ready_obs(self) -> Any:
        """Observations of the envs that need an action, by env_id.

        Waits until an env needs one. It is empty if no env can need an action: each env is DONE, ERROR or NEED_RESET, or
        executes an action.
        """
        self._offered_ids = self._ready_ids()
        return {env_id: self._ready_obs[env_id] for env_id in self._offered_ids}

    def _ready_ids(self) -> list[int]:
        """Return the envs that need an action, after waiting until there is one, or none can need one."""
        self._handle_ready_replies()
        if not self._closed:
            self._process_replies(
                lambda: not self._known_ready_ids() and bool(self._env_states.ids_in(EnvState.RESET)),
                text="VEC_ENV_MANAGER: all the not done envs are resetting, sleep %d times",
            )
        return self.ready_env

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """Frames ("rgb_array") of the envs that need an action, by env_id; `render_ready` has other modes."""
        return self.render_ready()

    @property
    def done(self) -> bool:
        """Whether all envs are DONE."""
        return all(state is EnvState.DONE for state in self._env_states.values())

    def random_action(self) -> dict[int, Any]:
        """Return a random action of the action space for each env that needs one, and wait as `ready_obs` does."""
        space = self.action_space
        self._offered_ids = self._ready_ids()
        return {env_id: space.sample() for env_id in self.ready_obs_id}

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _handle_ready_replies(self) -> None:
        """Handle the replies that have arrived, without waiting.

        Raises:
            RetriesError: as for `_process_replies`.
        """
        if not self._closed:
            pending = self._open_client().pending
            self._process_replies(lambda: len(pending) + len(self._retry_at), until=0.0)

    def _unreturned_steps(self) -> set[int]:
        """Return the envs that have an action and whose timestep no step() has returned yet."""
        pending = () if self._client is None else self._client.pending.items()
        return {*self._results, *(env_id for env_id, kind in pending if kind is Command.STEP)}

    def _begin_steps(self, actions: Mapping[int, Any]) -> list[int]:
        """Handle the available replies, and send the actions. Return the envs that step.

        Raises:
            AssertionError: the manager is closed, or an env does not need an action.
        """
        self._check_closed()
        self._handle_ready_replies()
        self._offered_ids = None
        self._check_ids(actions.keys())
        env_ids = whole_ids(actions)
        self._check_ready(env_ids)
        self._open_client().send_steps(actions)
        return env_ids

    def _check_ready(self, env_ids: Sequence[int]) -> None:
        """Check that envs need an action.

        Raises:
            AssertionError: an env does not. The message is DI-engine's, with the states of the envs.
        """
        waiting = self._unreturned_steps()
        states = self._env_states
        if any(states[env_id] is not EnvState.RUN or env_id in waiting for env_id in env_ids):
            named = {env_id: states[env_id] for env_id in env_ids}
            busy = f"; envs {sorted(waiting)} still execute an action" if waiting else ""
            raise ManagerUsageError(
                f"current env state are: {named}, please check whether the requested env is in reset or done{busy}"
            )

    def _collect_timesteps(self, env_ids: Iterable[int]) -> dict[int, Any]:
        """Return the timesteps of these envs, update their states, and begin their automatic resets."""
        timesteps: dict[int, Any] = {}
        errors: list[StepmillError] = []
        ended_ids: list[int] = []
        for env_id in env_ids:
            timestep = self._results.pop(env_id)
            if isinstance(timestep, StepmillError):
                if not self._becomes_abnormal(timestep):
                    self._env_states.move(env_id, EnvState.ERROR)
                    errors.append(timestep)
                    continue
                timestep = self._abnormal_timestep(env_id, timestep)
            timesteps[env_id] = timestep
            info = timestep[3]
            if info and self._marks_abnormal and is_abnormal(info):
                self._env_states.move(env_id, EnvState.ERROR)
            elif timestep[2]:
                ended_ids.append(env_id)
            else:
                self._ready_obs[env_id] = timestep[0]
        for env_id in ended_ids:
            self._end_episode(env_id, timesteps[env_id])
        if errors:
            self._fail_step(errors, timesteps)
        return timesteps

    def _end_episode(self, env_id: int, timestep: Any) -> None:
        self._env_episode_count[env_id] += 1
        if self._env_episode_count[env_id] >= self._episode_num:
            self._env_states.move(env_id, EnvState.DONE)
        elif not self._cfg.auto_reset:
            self._env_states.move(env_id, EnvState.NEED_RESET)
        elif self._cfg.get("reset_inplace"):  # the step has reset the env
            self._ready_obs[env_id] = timestep[0]
        else:
            self._begin_reset(env_id)

    def _becomes_abnormal(self, error: StepmillError) -> bool:
        """Whether a failed step becomes an abnormal timestep; otherwise it is raised."""
        return False

    def _fail_step(self, errors: Sequence[StepmillError], timesteps: dict[int, Any]) -> NoReturn:
        """Raise the errors of failed steps; `timesteps` are those of the other envs."""
        raise NotImplementedError

    def _abnormal_timestep(self, env_id: int, error: StepmillError) -> Any:
        logger.warning("env %d returns an abnormal timestep; reset it to continue: %s", env_id, error.message)
        if isinstance(error, (EnvError, BadOutput)):
            self._needs_seed.add(env_id)
        if is_torn(error):
            self._needs_renewal.add(env_id)
        info = {"abnormal": True, "fault": type(error).__name__, "message": error.message}
        return timestep_class()(None, None, None, info)

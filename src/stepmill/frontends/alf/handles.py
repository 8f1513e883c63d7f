"""Gives access to one env of a parallel environment: to its methods as promises, and to its attributes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from stepmill.frontends.alf import nests
from stepmill.frontends.alf.errors import as_runtime_error
from stepmill.frontends.alf.nests import converter
from stepmill.pool.pool import Pool
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import StepmillError, UsageError


@dataclass(frozen=True)
class AlfSpecs:
    """The specs of an env, as nests of the env's own spec objects, and its other properties."""

    action_spec: Any
    observation_spec: Any
    reward_spec: Any
    time_step_spec: Any
    env_info_spec: Any
    batch_size: int
    batched: bool
    is_tensor_based: bool
    num_tasks: int
    task_names: Sequence[str]

    @classmethod
    def of(cls, spec: EnvSpec) -> AlfSpecs:
        """Read the specs from the EnvSpec of an ALF env."""
        described: Mapping[str, Any] = pickle.loads(spec.spaces)
        return cls(**described)


class HasSpecs:
    """The spec methods of ALF envs, without a batch dimension. The specs are known from the start."""

    @cached_property
    def _specs(self) -> AlfSpecs:
        raise NotImplementedError

    def observation_spec(self) -> Any:
        """Return the spec of an observation."""
        return self._specs.observation_spec

    def action_spec(self) -> Any:
        """Return the spec of an action."""
        return self._specs.action_spec

    def reward_spec(self) -> Any:
        """Return the spec of a reward."""
        return self._specs.reward_spec

    def time_step_spec(self) -> Any:
        """Return the spec of a TimeStep."""
        return self._specs.time_step_spec

    def env_info_spec(self) -> Any:
        """Return the spec of an env_info."""
        return self._specs.env_info_spec


# The fields that must be equal in all envs, in the order of the checks, and ALF's names for them.
_MUST_BE_EQUAL = {
    "action_spec": "action spec",
    "time_step_spec": "time_step_spec",
    "env_info_spec": "env_info_spec",
    "batch_size": "batch_size",
    "batched": "batched",
}


def check_specs(all_specs: Sequence[AlfSpecs]) -> None:
    """Check that all envs and spares can be stepped together.

    Raises:
        UsageError: an env is tensor-based, or differs from env 0. The message is ALF's, and names the first such env.
    """
    for env_id, specs in enumerate(all_specs):
        if specs.is_tensor_based:
            raise UsageError(f"All environments must be array-based environments. Env {env_id} is tensor-based.")
    for name, title in _MUST_BE_EQUAL.items():
        first = getattr(all_specs[0], name)
        for env_id, specs in enumerate(all_specs):
            own = getattr(specs, name)
            if not is_equal(own, first):
                raise UsageError(
                    f"All environments must have the same {title}. Env {env_id} has {own}, and env 0 has {first}."
                )


def is_equal(one: Any, other: Any) -> bool:
    """Whether two nests of specs are equal.

    A class that a script or a function defines is another class in each worker: specs whose classes have the same name are
    compared by their attributes.
    """
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(is_equal(one[key], other[key]) for key in one)
    if _name_of(one) != _name_of(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if type(one) is type(other):
        return bool(np.all(one == other))
    return is_equal(_attributes_of(one), _attributes_of(other))


def _name_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _attributes_of(value: object) -> dict[str, Any]:
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(value, name, None) for name in names}, **getattr(value, "__dict__", {})}


Value = TypeVar("Value")


class Promise(Generic[Value]):
    """The future result of a call. Calling the promise waits for it; repeated calls return it again, in any order."""

    def __init__(self, fetch: Callable[[], Value], fields: Sequence[str] = ()) -> None:
        """`fetch()` waits for the result; `fields` are those of a TimeStep, for errors."""
        self._fetch, self._fields = fetch, fields
        self._outcome: tuple[Value] | StepmillError | None = None

    def __call__(self) -> Value:
        """Wait for the result and return it.

        Raises:
            EnvError: the env raised, also a RuntimeError.
            WorkerDied: its process ended.
        """
        if self._outcome is None:
            try:
                self._outcome = (self._fetch(),)
            except StepmillError as error:
                self._outcome = as_runtime_error(error, self._fields)
                raise self._outcome from error
        if isinstance(self._outcome, StepmillError):
            raise self._outcome
        return self._outcome[0]


class EnvMethods(HasSpecs):
    """The methods of ALF's ProcessEnvironment for one env of a pool. Other attributes are read from the env in its process."""

    _env_id = 0

    @cached_property
    def _fields(self) -> Sequence[str]:
        """The fields of a TimeStep, for errors."""
        return ()

    def _running_pool(self) -> Pool:
        """Return the pool if the env may be used."""
        raise NotImplementedError

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Step this env; return its TimeStep, or a promise of it if not `blocking`.

        Raises:
            EnvError, WorkerDied, EnvTimeout: the env failed; also a RuntimeError.
            BusyEnvError: the result of its last step was not received.
        """
        promise = self.call("step", action)
        return promise() if blocking else promise

    def reset(self, blocking: bool = True) -> Any:
        """Reset this env; return its TimeStep, or a promise of it if not `blocking`."""
        promise = self.call("reset")
        return promise() if blocking else promise

    def call(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Promise[Any]:
        """Start a call of a method of the env, or of a function that takes the env; return a promise of its result."""
        if name == "step":
            return self._begin_step(*args, **kwargs)
        if name == "reset":
            return self._begin_reset(*args, **kwargs)
        return call_one(self._running_pool(), self._env_id, _close if name == "close" else name, *args, **kwargs)

    def render(self, mode: str = "human") -> Any:
        """Render the env and wait for the frame."""
        return self.call("render", mode)()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pool = self._running_pool()
        try:
            return pool.get_attr(name, env_ids=[self._env_id])[0]
        except StepmillError as error:
            if getattr(error, "error_type", "").rpartition(".")[2] == "AttributeError":
                raise AttributeError(str(error)) from error
            raise as_runtime_error(error) from error

    def _idle_pool(self) -> Pool:
        """Return the pool if a step may begin."""
        return self._running_pool()

    def _begin_step(self, action: Any) -> Promise[Any]:
        self._idle_pool().send(self._converters[0](action), env_ids=[self._env_id])
        return self._promise()

    def _begin_reset(self) -> Promise[Any]:
        self._idle_pool().reset_async(env_ids=[self._env_id])
        return self._promise()

    def _promise(self) -> Promise[Any]:
        """Return the promise of the TimeStep of the command that was sent."""
        return Promise(self._fetch, self._fields)

    def _fetch(self) -> Any:
        return self._converters[1](self._running_pool().recv(env_ids=[self._env_id]).obs)

    @cached_property
    def _converters(self) -> tuple[nests.Convert, nests.Convert]:
        """The functions that make a batch of an action, and a TimeStep of a batch."""
        spec, is_batched = self._running_pool().spec, self._specs.batched
        to_batch = nests.to_array if is_batched else lambda value: np.asarray(nests.to_array(value))[None]
        to_one = nests.to_array if is_batched else lambda value: nests.to_array(value)[0]
        return converter(spec.action, to_batch), converter(spec.observation, to_one)


class EnvHandle(EnvMethods):
    """The env in a slot of a parallel environment. With spares, it is the env in the slot at the time of the call.

    `step` and `reset` run this env alone, and return TimeSteps of NumPy arrays without a batch dimension. The parallel
    environment's own `step` is refused (BusyEnvError) until the promise of such a step is called.
    """

    def __init__(self, pool: Pool, env_id: int, specs: AlfSpecs) -> None:
        """Created by the parallel environment."""
        self._pool = pool
        self._env_id = env_id
        self._specs = specs

    def close(self) -> None:
        """Close this env. Its process lives until the parallel environment is closed."""
        self.call("close")()

    def _running_pool(self) -> Pool:
        return self._pool

    def __repr__(self) -> str:
        return f"EnvHandle(env_id={self._env_id})"


def _close(env: Any) -> None:
    env.close()


def call_one(pool: Pool, env_id: int, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Promise[Any]:
    """Start a call of a method of one env."""
    future = pool.call_async(name, *args, env_ids=[env_id], **kwargs)
    return Promise(lambda: future.result()[0])

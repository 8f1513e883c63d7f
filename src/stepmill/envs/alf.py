"""ALF environments: `step` and `reset` return a TimeStep, which specs describe.

They are recognized by their base class `alf.environments.alf_environment.AlfEnvironment`, or by their methods if an
`AlfEnvMaker` wraps them; ALF itself need not be installed. The engine's observation is the whole TimeStep, so that each of
its leaves lies in shared memory. The hot loop reads step type, reward and discount from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle
import numpy as np

from stepmill.envs import Steppable
from stepmill.envs.env_adapter import EnvAdapter
from stepmill.spec.env import EnvSpec, TimeStepFields
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import PLAIN_DTYPE_KINDS, DictNode, Leaf, LeafKind, Node, TupleNode, as_list

LAST = 2  # the step_type of the last TimeStep of an episode
PROGRESS = "stepmill_progress"  # setting this attribute of an AlfEnv reports the learner's progress to ALF's schedulers
_NO_INFO: dict[str, object] = {}  # the hot loop sends nothing for an empty dict
_ENV_ID = "env_id"
_SPECS = ("action_spec", "observation_spec", "env_info_spec", "time_step_spec")


class NotAlfEnvError(UsageError):
    """An object lacks methods of an ALF env."""


@dataclass(frozen=True)
class AlfEnvMaker:
    """An env_fn that calls an ALF constructor with an env_id."""

    constructor: Callable[..., object]
    env_id: int | None

    def __call__(self) -> AlfEnv:
        # A worker computes on the CPU, even if the learner uses another device.
        set_device = getattr(sys.modules.get("alf"), "set_default_device", None)
        if set_device is not None:
            set_device("cpu")
        return AlfEnv(self.constructor(env_id=self.env_id))


class AlfEnv(EnvAdapter):
    """Adapts an ALF environment to the hot loop, which calls the environment's own `step` unless it is batched."""

    _has_wrappers = False

    def __init__(self, env: object) -> None:
        missing = [name for name in ("reset", "step", *_SPECS) if not callable(getattr(env, name, None))]
        if missing:
            raise NotAlfEnvError(
                f"a {type(env).__module__}.{type(env).__qualname__} is not an ALF environment: it has no "
                f"{', '.join(f'{name}()' for name in missing)}; return an AlfEnvironment, or an object with its methods"
            )
        super().__init__(env)
        self._is_batched = is_batched(env)

    @property
    def step(self) -> Callable[[object], object]:
        """The env's own step, or for a batched env a function that adds the rewards and flags of the rows."""
        step: Callable[[object], object] = self._step_rows if self._is_batched else self.env.step
        return step

    def _step_rows(self, action: object) -> tuple[object, ...]:
        time_step = self.env.step(action)
        is_last = np.asarray(time_step.step_type) == LAST
        is_zero = np.asarray(time_step.discount) == 0
        return time_step, np.zeros(len(is_last)), is_last & is_zero, is_last & ~is_zero, _NO_INFO

    def reset(
        self, *, seed: object = None, options: Mapping[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Reset the env, after seeding it if a seed is given."""
        if options:
            raise UsageError(f"an ALF environment takes no reset options; leave out {sorted(options)}")
        if seed is not None:
            self.env.seed(seed)
        return self.env.reset(), _NO_INFO

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the env itself. A value of `PROGRESS` is passed to ALF's schedulers and to the env."""
        if name == PROGRESS:
            self._update_progress(value)
        else:
            super().set_wrapper_attr(name, value)

    def _update_progress(self, progress: Mapping[str, float]) -> None:
        schedulers = sys.modules.get("alf.utils.schedulers")
        for owner in (schedulers, self.env):
            update = getattr(owner, "update_all_progresses", None)
            if update is not None:
                update(progress)


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of an ALF environment."""
    own: Any = env.env if isinstance(env, AlfEnv) else env
    described = {
        **{name: getattr(own, name)() for name in _SPECS},
        "reward_spec": own.reward_spec() if hasattr(own, "reward_spec") else own.time_step_spec().reward,
        "batch_size": int(own.batch_size) if is_batched(own) else 1,
        "batched": is_batched(own),
        "is_tensor_based": bool(getattr(own, "is_tensor_based", False)),
        "num_tasks": getattr(own, "num_tasks", 1),
        "task_names": getattr(own, "task_names", ["0"]),
    }
    time_step = described["time_step_spec"]
    fields = getattr(time_step, "_fields", ())
    wanted = {"step_type", "reward", "discount", "observation", "prev_action", _ENV_ID}
    if not wanted <= set(fields):
        raise UsageError(
            f"time_step_spec() of {own} has the fields {list(fields)}; return a named tuple with {sorted(wanted)}"
        )
    if "env_info" in fields:
        time_step = time_step._replace(env_info=described["env_info_spec"])
    reward_shape = tuple(time_step.reward.shape)
    tree = tree_of(time_step, "time_step")
    env_id = cast("TupleNode", tree).children[fields.index(_ENV_ID)]
    if not isinstance(env_id, Leaf) or env_id.kind is not LeafKind.DISCRETE:
        raise UsageError(f"time_step_spec().{_ENV_ID} of {own} is {env_id}; make it the spec of one integer")
    return EnvSpec(
        observation=tree,
        action=tree_of(described["action_spec"], "action"),
        batch_size=described["batch_size"],
        is_batched=described["batched"],
        time_step=None
        if described["batched"]
        else TimeStepFields(
            fields.index("step_type"), -1 if reward_shape else fields.index("reward"), fields.index("discount")
        ),
        metadata=_metadata_of(own, is_batched=described["batched"]),
        spaces=_pickle_specs(described, own),
    )


def adapt(env: object) -> Steppable:
    """Return the object that the hot loop steps."""
    return cast("Steppable", env if isinstance(env, AlfEnv) else AlfEnv(env))


def is_batched(env: Any) -> bool:
    """Whether one call of the env's `step` steps several rows."""
    return bool(getattr(env, "batched", False))


def tree_of(spec: Any, path: str) -> Node:
    """Return the tree of a nest of specs: dicts, lists, tuples and named tuples of objects with a shape and a dtype.

    Raises:
        UsageError: a part of the nest is none of these, or has a dtype that NumPy does not have.
    """
    if isinstance(spec, Mapping):
        return DictNode(tuple((key, tree_of(child, f"{path}[{key!r}]")) for key, child in spec.items()))
    if isinstance(spec, (tuple, list)):
        names = getattr(spec, "_fields", [f"[{index}]" for index in range(len(spec))])
        children = tuple(tree_of(child, f"{path}.{name}") for name, child in zip(names, spec, strict=True))
        factory = as_list if isinstance(spec, list) else type(spec) if hasattr(spec, "_fields") else None
        return TupleNode(children, factory)
    if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
        raise UsageError(
            f"{path} is a {type(spec).__name__}; a spec must have a shape and a dtype, or be a nest of such"
        )
    dtype = numpy_dtype(spec.dtype, path)
    shape = tuple(int(size) for size in spec.shape)
    kind = LeafKind.ARRAY if shape else LeafKind.DISCRETE if dtype.kind in "iu" else LeafKind.SCALAR
    return Leaf(dtype, shape, kind)


def numpy_dtype(dtype: object, path: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype that has the name of `dtype`, which is a dtype of torch or NumPy, or a string.

    Raises:
        UsageError: NumPy has no such dtype, or arrays of it cannot lie in shared memory.
    """
    try:
        found = dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])
    except TypeError:
        try:
            found = np.dtype(cast("Any", dtype))
        except TypeError:
            found = None
    if found is None or found.kind not in PLAIN_DTYPE_KINDS:
        raise UsageError(f"{path} has dtype {dtype}, which cannot lie in shared memory; use numbers or bools")
    return found.newbyteorder("=")


def _metadata_of(env: Any, *, is_batched: bool) -> dict[str, object]:
    metadata = getattr(env, "metadata", None)
    own = dict(metadata) if isinstance(metadata, Mapping) else {}
    return {**own, "autoreset_mode": "NextStep"} if is_batched else own


def _pickle_specs(described: Mapping[str, object], env: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(described))
    except Exception as exc:
        raise UsageError(
            f"the specs of {env} cannot be pickled: {type(exc).__name__}: {exc}; make them of plain data only"
        ) from exc

"""The kernels that come with stepmill, by the ids of the envs that they are."""

from __future__ import annotations

from importlib import import_module

from stepmill.kernels.mujoco_tasks import IDS as MUJOCO_IDS
from stepmill.kernels.mujoco_tasks import make_mujoco
from stepmill.kernels.python import PythonKernel
from stepmill.kernels.toy_text import make_tabular
from stepmill.spec.errors import UsageError

_HOME = {
    "CartPole-v1": "classic_control:cartpole",
    "MountainCar-v0": "classic_control:mountain_car",
    "MountainCarContinuous-v0": "classic_control:mountain_car_continuous",
    "Pendulum-v1": "classic_control:pendulum",
    "Acrobot-v1": "classic_control:acrobot",
    "Blackjack-v1": "toy_text:blackjack",
    "stepmill/Catch84-v0": "catch:catch",
}
_TABULAR = ("FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4", "CliffWalking-v1", "CliffWalkingSlippery-v1")


def names() -> tuple[str, ...]:
    """Return the ids."""
    return (*_HOME, *_TABULAR, *MUJOCO_IDS)


def find(id: str) -> PythonKernel:  # noqa: A002  Gymnasium's name
    """Return the kernel of an id.

    Raises:
        UsageError: there is none; the error lists those that there are.
    """
    if id in MUJOCO_IDS:
        return make_mujoco(id)
    if id in _TABULAR:
        return make_tabular(id)
    if id not in _HOME:
        raise UsageError(
            f"there is no kernel for {id!r}; there are {', '.join(names())}, or write one: docs/kernels.md. "
            "Other backends run every env"
        )
    module, _, name = _HOME[id].partition(":")
    kernel: PythonKernel = getattr(import_module(f"stepmill.kernels.{module}"), name)
    return kernel

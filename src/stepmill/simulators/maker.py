"""`foreign`: env functions whose envs run in another Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from stepmill.spec.errors import UsageError

if TYPE_CHECKING:
    from stepmill.simulators.env import SimulatorEnv


@dataclass(frozen=True)
class SimulatorEnvMaker:
    """An env function that starts another interpreter, in which the env is made."""

    make: str
    command: tuple[str, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    keeps_time_limits: ClassVar[bool] = True  # also on backends that cannot end a late env

    def __call__(self) -> SimulatorEnv:
        from stepmill.simulators.env import SimulatorEnv  # it loads Gymnasium, which the learner may not need

        return SimulatorEnv(self)


def foreign(make: str, *, python: str | os.PathLike[str] | Sequence[str], **kwargs: object) -> SimulatorEnvMaker:
    """Return an env function whose env runs in another Python, with other versions of Python, NumPy and Gymnasium or gym.

    Each env has a process of the other interpreter, which its worker starts, and which ends with its worker. Nothing of
    stepmill is installed there: the interpreter needs NumPy, and must be Python 3.6 or newer.

    Args:
        make: "module:function" or "path/file.py:function". The other interpreter looks it up and calls it. The function
            returns an env of Gymnasium or gym, or an object with their methods.
        python: the path of the interpreter, or a command as a list, to which arguments are added, such as ["conda", "run",
            "-n", "libero", "python"], ["docker", "run", "-i", "--rm", "image", "python"] or ["ssh", "host", "python3"].
        **kwargs: the keyword arguments of the function: plain data and arrays.
    Returns:
        A function without arguments that makes the env, for every class and function of stepmill that takes one. It can
        be pickled.
    Raises:
        UsageError: an argument has another form, or a keyword argument cannot be sent to another Python.
    """
    from stepmill.simulators import other_side

    home, _, name = make.rpartition(":")
    if not home or not name.replace(".", "_").isidentifier():
        raise UsageError(f"make={make!r} must be a text 'module:function' or 'path/file.py:function'")
    command = tuple(os.fspath(word) for word in ([python] if isinstance(python, (str, os.PathLike)) else python))
    if not command or not all(command):
        raise UsageError(f"python={python!r} must be the path of an interpreter, or a command as a list of texts")
    other_side.load_numpy()
    try:
        other_side.Codec().dumps(kwargs)
    except other_side.CannotCarry as error:
        raise UsageError(f"the keyword arguments of {make!r}: kwargs{error}") from None
    return SimulatorEnvMaker(make, command, kwargs)

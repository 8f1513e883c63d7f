"""Kernels in Python: `@stepmill.kernel`. Numba compiles a kernel when a pool first needs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gymnasium import Space

from stepmill.kernels.env import KernelEnv, KernelMemory, native_calls, python_calls
from stepmill.kernels.row_layouts import check_infos, describe_spaces, row_layout
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.kernel import KernelProgram

if TYPE_CHECKING:
    from typing_extensions import Self

_ARGUMENTS = {"reset": ("state", "rng", "obs"), "step": ("state", "action", "rng", "obs")}


def kernel(
    *,
    observation_space: Space[Any],
    action_space: Space[Any],
    state: Any,
    max_episode_steps: int | None = None,
    infos: Any = None,
    debug: bool = False,
) -> Callable[[type], PythonKernel]:
    """Make a kernel from a class that holds functions.

        @stepmill.kernel(observation_space=..., action_space=..., state=np.dtype([("x", "f8")]))
        class Walk:
            def reset(state, rng, obs): ...
            def step(state, action, rng, obs): ...  # returns (reward, terminated, truncated)
            def set_x(state, x): ...                # a method: pool.call("set_x", 1.0)

    `reset` and `step` are compiled; they may call other functions that are decorated with `numba.njit`. `obs` is the
    row of the batch: write all of it. Keep all memory of an env in `state`, whose fields are attributes, and in `rng`,
    because global variables are constants. The other functions of the class are methods, which are not compiled.

    Args:
        observation_space, action_space: Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of those.
        state: a structured dtype, or a value that `np.dtype` converts to one; the state is zero before the first reset.
        max_episode_steps: after this many steps an episode is truncated; None means no limit.
        infos: a structured dtype of numbers and arrays of numbers. `reset` and `step` then get one more argument, `info`: a
            record with these fields, all zero at first. Batches have them as arrays [B, ...] under their names.
        debug: whether to check the bounds of array indices, which costs time.
    Raises:
        UsageError: a function is missing, or has other arguments.
    """
    dtype = np.dtype(state)
    if dtype.names is None or dtype.hasobject:
        raise UsageError(
            f"the state {dtype} of a kernel is not a structured dtype of numbers; give np.dtype([('x', 'f8'), ...])"
        )
    if max_episode_steps is not None and max_episode_steps < 1:
        raise UsageError(f"max_episode_steps={max_episode_steps} must be 1 or more, or None")

    def make(body: type) -> PythonKernel:
        spaces = observation_space, action_space
        state, limit = np.dtype(dtype, align=True), max_episode_steps or 0
        return PythonKernel(body, spaces, state, limit, infos=check_infos(infos, body.__name__), is_debug=debug)

    return make


class PythonKernel:
    """A kernel in Python. Give it to a pool once for each env: `Pool([kernel] * 64, backend="kernel")`.

    On other backends it is an env function: each call returns a Gymnasium env.

    Attributes:
        name: the name of its class.
        observation_space, action_space: the spaces of its envs.
        state: the dtype of an env's state.
        infos: the dtype of its infos; None if it has none.
        max_episode_steps: after this many steps an episode is truncated; 0 means no limit.
        is_debug: whether compiled code checks the bounds of array indices.
        reset, step: the functions, in Python.
        methods: the other functions of the class, by name.
        saved_bytes: how many bytes of the state belong to a snapshot, from its beginning.
        identity: distinguishes it from other kernels with the same name and rows.
        find_again: finds a kernel that comes with stepmill by its identity, in another process; None for others.
    """

    identity = ""
    find_again: Callable[[str], PythonKernel] | None = None

    def __init__(
        self,
        body: type,
        spaces: tuple[Space[Any], Space[Any]],
        state: np.dtype[Any],
        max_episode_steps: int,
        *,
        infos: np.dtype[Any] | None = None,
        is_debug: bool,
    ) -> None:
        self.name = body.__name__
        self.__doc__ = body.__doc__
        self.__module__ = body.__module__
        self.observation_space, self.action_space = spaces
        self.state = state
        self.saved_bytes = state.itemsize
        self.infos = infos
        self.max_episode_steps = max_episode_steps
        self.is_debug = is_debug
        functions = {name: item for name, item in vars(body).items() if inspect.isfunction(item)}
        for name, wanted in _ARGUMENTS.items():
            _check_arguments(self.name, name, functions.get(name), wanted if infos is None else (*wanted, "info"))
        self.reset, self.step = functions.pop("reset"), functions.pop("step")
        self.methods: Mapping[str, Callable[..., Any]] = functions
        self._program: KernelProgram | None = None

    def __repr__(self) -> str:
        return f"<stepmill.kernel {self.name}>"

    def __call__(self, *, compiled: bool = True) -> KernelEnv:
        """Return one env, for any backend except "kernel".

        Args:
            compiled: False runs the functions as Python, for a debugger. The results are the same.
        """
        observation = row_layout(self._spec.observation, "observation_space")
        memory = KernelMemory(self.state, observation, self._action_layout, self.infos)
        run = native_calls(self.compile(), memory) if compiled else python_calls(self.reset, self.step, memory)
        spaces = self.observation_space, self.action_space
        return KernelEnv(self._spec, spaces, memory, self.max_episode_steps, dict(self.methods), run)

    def describe(self) -> EnvSpec:
        """Return the spec of its envs."""
        return self._spec

    def compile(self) -> KernelProgram:
        """Compile the kernel, or load its compiled code from the cache. Later calls return the same program.

        Raises:
            MissingExtraError: Numba is not installed.
            UsageError: Numba refuses a function, or a function allocates memory.
        """
        if self._program is None:
            import_numba()
            compiler = import_module("stepmill.kernels.compiler")
            self._program = compiler.compile_kernel(
                self, row_layout(self._spec.observation, "observation_space"), self._action_layout
            )
        return self._program

    @cached_property
    def _spec(self) -> EnvSpec:
        return describe_spaces(self.observation_space, self.action_space, self.infos)

    @property
    def _action_layout(self) -> Any:
        return row_layout(self._spec.action, "action_space")

    def with_limit(self, max_episode_steps: int) -> Self:
        """Return the same kernel with another time limit; 0 means no limit."""
        return _make_again(type(self), {**self.__dict__, "max_episode_steps": max_episode_steps, "_program": None})

    def __reduce__(self) -> tuple[Callable[..., PythonKernel], tuple[Any, ...]]:
        """Pickle a kernel that comes with stepmill as its id. Omit the program, whose addresses are of this process."""
        if self.find_again is not None:
            return self.find_again, (self.identity,)
        return _make_again, (type(self), {**self.__dict__, "_program": None})


_Kernel = TypeVar("_Kernel", bound="PythonKernel")


def _make_again(kind: type[_Kernel], fields: dict[str, Any]) -> _Kernel:
    made = kind.__new__(kind)
    made.__dict__.update(fields)
    return made


def import_numba() -> None:
    """Import Numba.

    Raises:
        MissingExtraError: it is not installed.
    """
    with needs_extra("numba", "numba"):
        import_module("numba")


def _check_arguments(kernel: str, name: str, function: Callable[..., Any] | None, wanted: tuple[str, ...]) -> None:
    if function is None:
        raise UsageError(f"the kernel {kernel} has no function {name}; give it {name}({', '.join(wanted)})")
    names = tuple(inspect.signature(function).parameters)
    if len(names) != len(wanted):
        raise UsageError(f"{name}({', '.join(names)}) of the kernel {kernel} must be {name}({', '.join(wanted)})")

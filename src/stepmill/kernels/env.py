"""One env of a kernel as a Gymnasium env: for every backend except "kernel", and for debugging a kernel."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from stepmill.kernels.rng import WORDS, Rng, seed_words
from stepmill.kernels.row_layouts import copy_value, make_row, read_row, row_argument, write_row
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelCall, KernelProgram, RowLayout, memory_of

MESSAGE_BYTES = 112
RESULT = np.dtype(
    [("reward", "f8"), ("terminated", "u1"), ("truncated", "u1"), ("message", f"S{MESSAGE_BYTES}")], align=True
)

StepResult: TypeAlias = "tuple[Any, float, bool, bool, dict[str, Any]]"


class KernelMemory:
    """The arrays that a kernel's functions read and write, for one env. `block` has any infos, and the state."""

    def __init__(
        self, state: np.dtype[Any], observation: RowLayout, action: RowLayout, infos: np.dtype[Any] | None = None
    ) -> None:
        self.block = np.zeros(1, memory_of(state, infos))
        self.info = None if infos is None else self.block["info"]
        self.state = self.block if infos is None else self.block["state"]
        self.words = np.random.SeedSequence().generate_state(WORDS, np.uint64).astype(np.uint64)
        self.obs = make_row(observation)
        self.action = make_row(action)
        self.result = np.zeros(1, RESULT)
        self._rows = observation, action

    @property
    def record(self) -> Any:
        """The state as a record, without a copy."""
        return self.state.view(np.recarray)[0]

    def begin(self) -> None:
        """Clear result and infos before a call."""
        self.result[0] = 0
        if self.info is not None:
            self.info[...] = 0

    def read_info(self) -> dict[str, Any]:
        """Return a copy of the infos, with bools of Python, because vector envs merge NumPy's bools to objects."""
        if self.info is None:
            return {}
        row = self.info[0]
        values = {name: copy_value(row[name]) for name in row.dtype.names or ()}
        return {name: bool(value) if isinstance(value, np.bool_) else value for name, value in values.items()}

    @property
    def info_arguments(self) -> tuple[Any, ...]:
        """The arguments that a kernel gets after `obs`: its infos, if it has any."""
        return () if self.info is None else (self.info.view(np.recarray)[0],)

    @property
    def obs_argument(self) -> Any:
        """The argument `obs` of a kernel."""
        return row_argument(self._rows[0], self.obs, is_action=False)

    @property
    def action_argument(self) -> Any:
        """The argument `action` of a kernel."""
        return row_argument(self._rows[1], self.action, is_action=True)


class KernelEnv(gymnasium.Env[Any, Any]):
    """One env of a kernel. The methods that the kernel declares can be called on it.

    Args:
        spec: the spec of the env.
        spaces: the observation space and the action space.
        memory: the arrays that the kernel's functions use.
        limit: an episode is truncated after this many steps; 0 means no limit.
        methods: the kernel's methods by name; each takes the state first.
        run: two functions, one that resets and one that steps; both write to `memory`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]],
        memory: KernelMemory,
        limit: int,
        methods: dict[str, Callable[..., Any]],
        run: tuple[Callable[[], None], Callable[[], None]],
    ) -> None:
        self.observation_space, self.action_space = spaces
        self.env_spec = spec
        self.memory = memory
        self._limit = limit
        self._methods = methods
        self._run_reset, self._run_step = run
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Raises:
            UsageError: `options` is not empty.
        """
        if options:
            raise UsageError("kernels take no reset options; declare a kernel method and call it before reset()")
        if seed is not None:
            seed_words(self.memory.words, seed)
        self.memory.begin()
        self._run_reset()
        self._num_steps = 0
        return read_row(self.env_spec.observation, self.memory.obs), self.memory.read_info()

    def step(self, action: Any) -> StepResult:
        """Step the env, as Gymnasium specifies."""
        write_row(self.env_spec.action, self.memory.action, action)
        self.memory.begin()
        self._run_step()
        self._num_steps += 1
        result = self.memory.result[0]
        has_reached_limit = 0 < self._limit <= self._num_steps
        obs = read_row(self.env_spec.observation, self.memory.obs)
        return (
            obs,
            float(result["reward"]),
            bool(result["terminated"]),
            bool(result["truncated"]) or has_reached_limit,
            self.memory.read_info(),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"the kernel does not declare a method {name!r}")
        method = self._methods[name]
        return lambda *args, **kwargs: method(self.memory.record, *args, **kwargs)


def python_calls(
    reset: Callable[..., Any], step: Callable[..., Any], memory: KernelMemory
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that call a kernel's `reset` and `step` as Python."""
    rng = Rng(memory.words)

    def run_reset() -> None:
        reset(memory.record, rng, memory.obs_argument, *memory.info_arguments)

    def run_step() -> None:
        arguments = memory.record, memory.action_argument, rng, memory.obs_argument
        reward, terminated, truncated = step(*arguments, *memory.info_arguments)
        memory.result[0] = (reward, terminated, truncated, b"")

    return run_reset, run_step


def native_calls(program: KernelProgram, memory: KernelMemory) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that call a kernel's compiled `reset` and `step`."""
    obs, action = memory.obs, memory.action
    leading = [_address(memory.block)]
    trailing = [_address(memory.words), _address(obs), _address(memory.result)]
    # Numba writes the return value to the first, the exception's address to the second.
    outcome = (ctypes.c_uint64 * 2)()
    extra = [ctypes.addressof(outcome), ctypes.addressof(outcome) + 8] if program.call is KernelCall.NUMBA else []

    def make_call(address: int, arguments: list[int]) -> Callable[[], None]:
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * len(arguments))(address)

        def run() -> None:
            status = function(*arguments)
            if status:
                message, _ = codecs.utf_8_decode(bytes(memory.result[0]["message"]).partition(b"\0")[0], "replace")
                kind, text = program.explain(status, outcome[1], message)
                raise KernelError(f"{kind}: {text}" if text else kind)

        return run

    return (
        make_call(program.reset, [*extra, *leading, *trailing]),
        make_call(program.step, [*extra, *leading, _address(action), *trailing]),
    )


class KernelError(RuntimeError):
    """A compiled kernel raised, or returned a status other than OK."""


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)

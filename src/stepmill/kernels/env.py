"""One env of a kernel as a Gymnasium env: for every backend but "kernel", and to look for mistakes in a debugger."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from stepmill.kernels.rng import WORDS, Rng, seed_words
from stepmill.kernels.rows import make_row, read_row, row_argument, write_row
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelCall, KernelProgram, RowLayout

MESSAGE_BYTES = 112
RESULT = np.dtype(
    [("reward", "f8"), ("terminated", "u1"), ("truncated", "u1"), ("message", f"S{MESSAGE_BYTES}")], align=True
)

StepResult: TypeAlias = "tuple[Any, float, bool, bool, dict[str, Any]]"


class Memory:
    """What the functions of a kernel work on, for one env."""

    def __init__(self, state: np.dtype[Any], observation: RowLayout, action: RowLayout) -> None:
        self.state = np.zeros(1, state)
        self.words = np.random.SeedSequence().generate_state(WORDS, np.uint64).astype(np.uint64)
        self.obs = make_row(observation)
        self.action = make_row(action)
        self.result = np.zeros(1, RESULT)
        self._rows = observation, action

    @property
    def record(self) -> Any:
        """The state as a record that shares its memory."""
        return self.state.view(np.recarray)[0]

    @property
    def obs_argument(self) -> Any:
        """What a kernel gets as `obs`."""
        return row_argument(self._rows[0], self.obs, is_action=False)

    @property
    def action_argument(self) -> Any:
        """What a kernel gets as `action`."""
        return row_argument(self._rows[1], self.action, is_action=True)


class KernelEnv(gymnasium.Env[Any, Any]):
    """One env of a kernel. Methods that the kernel declares are attributes of it.

    Args:
        spec: of the env.
        spaces: its observation and action space.
        memory: of the env.
        limit: steps until an episode is truncated; 0 is no limit.
        methods: functions of the state.
        run_reset, run_step: do it, and leave the result in the memory.
    """

    def __init__(
        self,
        spec: EnvSpec,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]],
        memory: Memory,
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
            UsageError: there are options: kernels take none.
        """
        if options:
            raise UsageError("kernels take no reset options; declare a method, and call it")
        if seed is not None:
            seed_words(self.memory.words, seed)
        self.memory.result[0] = 0
        self._run_reset()
        self._num_steps = 0
        return read_row(self.env_spec.observation, self.memory.obs), {}

    def step(self, action: Any) -> StepResult:
        """Do a step."""
        write_row(self.env_spec.action, self.memory.action, action)
        self.memory.result[0] = 0
        self._run_step()
        self._num_steps += 1
        result = self.memory.result[0]
        is_late = 0 < self._limit <= self._num_steps
        obs = read_row(self.env_spec.observation, self.memory.obs)
        return obs, float(result["reward"]), bool(result["terminated"]), bool(result["truncated"]) or is_late, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"the kernel declares no method {name!r}")
        method = self._methods[name]
        return lambda *args, **kwargs: method(self.memory.record, *args, **kwargs)


def python_calls(
    reset: Callable[..., Any], step: Callable[..., Any], memory: Memory
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what runs a kernel's functions as Python."""
    rng = Rng(memory.words)

    def run_reset() -> None:
        reset(memory.record, rng, memory.obs_argument)

    def run_step() -> None:
        reward, terminated, truncated = step(memory.record, memory.action_argument, rng, memory.obs_argument)
        memory.result[0] = (reward, terminated, truncated, b"")

    return run_reset, run_step


def native_calls(program: KernelProgram, memory: Memory) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what runs a kernel's compiled functions."""
    state, obs, action = memory.state, memory.obs, memory.action
    front = [_address(state)]
    back = [_address(memory.words), _address(obs), _address(memory.result)]
    outcome = (ctypes.c_uint64 * 2)()  # a Numba function writes what it returns, and the address of its exception
    extra = [ctypes.addressof(outcome), ctypes.addressof(outcome) + 8] if program.call is KernelCall.NUMBA else []

    def caller(address: int, arguments: list[int]) -> Callable[[], None]:
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * len(arguments))(address)

        def run() -> None:
            status = function(*arguments)
            if status:
                message = bytes(memory.result[0]["message"]).decode(errors="replace")
                kind, text = program.explain(status, outcome[1], message)
                raise KernelError(f"{kind}: {text}" if text else kind)

        return run

    return (
        caller(program.reset, [*extra, *front, *back]),
        caller(program.step, [*extra, *front, _address(action), *back]),
    )


class KernelError(RuntimeError):
    """A compiled kernel raised, or returned a status other than OK."""


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)

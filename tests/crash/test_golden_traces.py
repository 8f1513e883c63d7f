"""What users get after each kind of fault, compared with recorded traces: policy x autoreset x form of the envs x fault.

A trace has a line per round of commands in which anything happens: the row of each env, errors, warnings, and states that are
not IDLE. A row is

    identity:clock/action tag=reward flags <fault>    flags: T terminated, U truncated, F with the clock of its final observation
    .                                                 the next step of the same episode, without flags

The fault hits env 0 while commands of the other envs wait: it is at a gate when they are sent. `python -m
tests.crash.test_golden_traces --write` records them again.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from stepmill.testing.gates import Gate, wait_at
from tests.chaos.envs import HANG, KILL, RAISE, TrappedEnv, Traps

GOLDEN = Path(__file__).with_name("golden_traces.txt")
NUM_ENVS = 4  # envs 0 and 1 share a worker until spares take their places
NUM_ROUNDS = 15
FAULTS_AT = (3, 11)  # in these rounds; faults in resets come with the first resets after these rounds
INVALID = 9
"""The action after which the reward is text."""
STEP_TIMEOUT_S = 3.0  # of the env that hangs; the others must not reach it on a busy machine
HOWS = {"dies": KILL, "raises": RAISE, "hangs": HANG, "invalid": INVALID}


@dataclass(frozen=True)
class Scenario:
    """One pool and its faults."""

    policy: str
    mode: str
    form: str
    where: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.policy} {self.mode} {self.form}: {self.how} in {self.where}"

    @property
    def rows_each(self) -> int:
        return 2 if self.form == "batched" else 1

    @property
    def num_spares(self) -> int:
        return 1 if self.form == "spares" else 0

    @property
    def has_processes(self) -> bool:
        return self.how in ("dies", "hangs")


FORMS = [
    ("NextStep", "plain"),
    ("NextStep", "spares"),
    ("NextStep", "batched"),
    ("SameStep", "plain"),
    ("SameStep", "batched"),
    ("Disabled", "plain"),
    ("Disabled", "spares"),
    ("Disabled", "batched"),
]
TRIED_EACH_TIME = {("NextStep", "plain"), ("NextStep", "spares"), ("SameStep", "batched"), ("Disabled", "plain")}
"""Of processes. The other forms are tried on them by the slow tests."""
FAULTS = [("step", "dies"), ("reset", "dies"), ("step", "raises"), ("reset", "raises"), ("step", "invalid")]


def scenarios() -> list[Scenario]:
    policies = ("raise", "truncate", "replay")
    each = [
        Scenario(policy, mode, form, where, how)
        for policy, (mode, form), (where, how) in itertools.product(policies, FORMS, FAULTS)
        # When a spare is reset depends on the machine, and so does which commands a death in that reset meets.
        if (form, where, how) != ("spares", "reset", "dies")
    ]
    return each + [Scenario(policy, "NextStep", "plain", "step", "hangs") for policy in policies]


class GatedEnv(TrappedEnv):
    """Waits at a gate before it triggers a trap, and knows an action that makes its reward invalid."""

    def __init__(self, folder: str, identity: int, length: int, gate: str | None) -> None:
        super().__init__(folder, identity, length, 600.0)
        self._folder, self._gate = Path(folder), gate

    def _wait(self, where: str) -> None:
        if self._gate is not None and (self._folder / f"{where}-{self.identity}").exists():
            wait_at(self._gate)

    def reset(self, **arguments: Any) -> Any:
        self._wait("reset")
        return super().reset(**arguments)

    def step(self, action: np.int64) -> Any:
        self._wait("step")
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, "much" if action == INVALID else reward, terminated, truncated, info


def length_of(identity: int) -> int:
    """Return the length of the episodes of an env object."""
    return 6 + identity % 2


def make_env(folder: str, gate: str | None, scenario: Scenario, identity: int) -> Any:
    length = length_of(identity)
    if scenario.rows_each == 1:
        return GatedEnv(folder, identity, length, gate)
    rows = [partial(GatedEnv, folder, 2 * identity + row, length, gate) for row in range(2)]
    return SyncVectorEnv(rows, autoreset_mode=AutoresetMode(scenario.mode))


class Tracer:
    """Drives one pool through a scenario, and writes its trace."""

    def __init__(self, scenario: Scenario, folder: str, gate: Gate) -> None:
        self.lines: list[str] = []
        self._scenario, self._gate = scenario, gate
        self._traps = Traps(folder)
        self._rows: dict[int, list[str]] = {}
        self._identities = [env_id * scenario.rows_each for env_id in range(NUM_ENVS)]
        self._clocks = [0] * NUM_ENVS
        self._next: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # by env and row: identity, tag and clock of the next step
        self._ended = [False] * NUM_ENVS
        self._notes: list[str] = []
        self._is_due = False
        options: dict[str, Any] = {"on_fault": scenario.policy, "autoreset_mode": scenario.mode, "backend": "serial"}
        if scenario.has_processes:
            options |= {"backend": "process", "context": "fork", "num_workers": 2}
        if scenario.how == "hangs":
            options["step_timeout_s"] = STEP_TIMEOUT_S
        path = str(gate.path) if scenario.has_processes else None
        fns = [partial(make_env, folder, path, scenario, i) for i in range(NUM_ENVS + scenario.num_spares)]
        self._pool = stepmill.Pool(fns, resets={"spare_envs": scenario.num_spares}, seeding="per_episode", **options)

    def run(self) -> list[str]:
        with self._pool:
            self._round("reset", lambda: self._pool.reset_async(seed=7))
            for number in range(NUM_ROUNDS):
                self._is_due |= number in FAULTS_AT[: 1 if self._scenario.how == "hangs" else 2]
                ended = [env_id for env_id in range(NUM_ENVS) if self._ended[env_id]]
                if self._scenario.mode == "Disabled" and ended:
                    self._command_resets(f"reset {ended}", ended)
                faulted = self._in_state(stepmill.EnvState.FAULTED, stepmill.EnvState.NEEDS_RESET)
                if faulted:
                    self._command_resets(f"reset {faulted}", faulted)
                self._command_steps(number)
        return self.lines

    def _in_state(self, *states: stepmill.EnvState) -> list[int]:
        return [env_id for env_id, state in enumerate(self._pool.states) if state in states]

    def _command_resets(self, title: str, env_ids: list[int]) -> None:
        is_hit = self._is_due and self._scenario.where == "reset" and self._scenario.mode == "Disabled" and 0 in env_ids
        self._break_env_0(is_hit)
        if not (is_hit and self._scenario.has_processes):
            self._round(title, lambda: self._pool.reset_async(env_ids=env_ids))
            return
        self._pool.reset_async(env_ids=[0])
        self._gate.wait_arrivals()
        self._round(title, lambda: self._pool.reset_async(env_ids=env_ids[1:]) if env_ids[1:] else None, opens=True)

    def _begins_reset(self) -> bool:
        """Whether the next step resets the object of env 0."""
        if self._scenario.mode == "SameStep" or self._scenario.form == "spares":
            return self._clocks[0] == length_of(self._identities[0] // self._scenario.rows_each) - 1
        return self._scenario.mode == "NextStep" and self._ended[0]

    def _command_steps(self, number: int) -> None:
        where, how = self._scenario.where, self._scenario.how
        is_hit = self._is_due and (self._begins_reset() if where == "reset" else not self._ended[0])
        actions = [(number + env_id) % 5 for env_id in range(NUM_ENVS)]
        if is_hit and how == "invalid":
            actions[0], self._is_due = INVALID, False
        elif is_hit:
            self._break_env_0(is_hit)
        rows = np.repeat(actions, self._scenario.rows_each)
        if not (is_hit and self._scenario.has_processes):
            self._round(f"{number}", partial(self._pool.send, rows))
            return
        self._pool.get_attr(
            "identity" if self._scenario.rows_each == 1 else "num_envs"
        )  # now the workers have no other command
        self._pool.send(rows[: self._scenario.rows_each], [0])
        self._gate.wait_arrivals()
        send = partial(self._pool.send, rows[self._scenario.rows_each :], [1, 2, 3])
        self._round(f"{number}", send, opens=True)

    def _break_env_0(self, is_hit: bool) -> None:
        if is_hit:
            self._is_due = False
            self._traps.set(self._scenario.where, self._identities[0], HOWS[self._scenario.how])

    def _round(self, title: str, send: Callable[[], object], *, opens: bool = False) -> None:
        """Send commands, receive all results, and write a line."""
        self._rows, self._notes = {}, []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._attempt(send)
            if opens:
                self._gate.open()
            while self._attempt(self._receive):
                pass
        self._notes += [f"warned: {each.message}" for each in caught]
        states = [
            f"{env_id} {state.name}"
            for env_id, state in enumerate(self._pool.states)
            if state is not stepmill.EnvState.IDLE
        ]
        rows = ["; ".join(self._rows[env_id]) for env_id in sorted(self._rows)]
        found = [*rows, *self._notes, *states]
        if any(set(each) - set(".; ") for each in found):
            self.lines.append(" | ".join([title, *found]))

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Call `action`, and note the error that it raises; return whether anything may be left to receive."""
        try:
            action()
        except stepmill.StepmillError as error:
            if "nothing pending" in error.message:
                return False
            env_ids = getattr(error, "env_ids", ()) or (getattr(error, "env_id", None),)
            self._notes.append(f"{type(error).__name__} {list(env_ids)}")
        return True

    def _receive(self) -> None:
        batch = self._pool.recv()
        for row, env_id in enumerate(batch.env_id.tolist()):
            place = row % self._scenario.rows_each
            identity, tag, clock = batch.obs[row][:3].tolist()
            text = self._describe(batch, row)
            is_next = (identity, tag, clock) == self._next.get((env_id, place)) and text.endswith(f"={clock}")
            self._next[env_id, place] = (identity, tag, clock + 1)
            self._rows.setdefault(env_id, []).append("." if is_next else text)
            if place == 0:
                self._identities[env_id], self._clocks[env_id] = identity, clock
            self._ended[env_id] = bool(batch.terminated[row] or batch.truncated[row])

    def _describe(self, batch: stepmill.Batch, row: int) -> str:
        info, obs = batch.info, batch.obs[row]
        flags = ["T"] * bool(batch.terminated[row]) + ["U"] * bool(batch.truncated[row])
        final = info.get("final_obs")
        if final is not None and info["_final_obs"][row]:
            flags.append(f"F{final[row][2]}")
        text = f"{obs[0]}:{obs[2]}/{obs[3]} {obs[1] % 1000}={batch.reward[row]:g} {''.join(flags)}".rstrip()
        faults = [_describe_fault(source, row) for source in (info, info.get("final_info", {}))]
        return " ".join(filter(None, [text, *faults]))


def _describe_fault(info: Any, row: int) -> str:
    if "fault" not in info or not info["_fault"][row]:
        return ""
    fault = info["fault"]
    reason = str(fault["not_replayable"][row]) if "not_replayable" in fault else ""
    return f"<{' '.join([fault['kind'][row], fault['error'][row], reason]).rstrip()}>"


def trace(scenario: Scenario) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, Gate() as gate:
        return Tracer(scenario, folder, gate).run()


def read_golden() -> dict[str, list[str]]:
    traces: dict[str, list[str]] = {}
    for block in GOLDEN.read_text().split("\n\n"):
        name, *lines = block.strip().splitlines()
        traces[name] = lines
    return traces


@pytest.fixture(scope="module")
def golden() -> dict[str, list[str]]:
    return read_golden()


def cases() -> list[Any]:
    found = []
    for each in scenarios():
        is_slow = each.has_processes and (each.mode, each.form) not in TRIED_EACH_TIME
        found.append(pytest.param(each, id=each.name.replace(" ", "-"), marks=pytest.mark.slow if is_slow else ()))
    return found


@pytest.mark.covers("G-1/repaired")
@pytest.mark.parametrize("scenario", cases())
def test_users_get_what_they_got_before(scenario: Scenario, golden: dict[str, list[str]]) -> None:
    assert trace(scenario) == golden[scenario.name]


def test_there_is_one_trace_for_each_scenario(golden: dict[str, list[str]]) -> None:
    assert list(golden) == [scenario.name for scenario in scenarios()]


def main() -> int:
    if sys.argv[1:] != ["--write"]:
        print(f"usage: python -m {__spec__.name} --write", file=sys.stderr)
        return os.EX_USAGE
    GOLDEN.write_text("\n\n".join("\n".join([each.name, *trace(each)]) for each in scenarios()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs all engines of a cell in turn, round by round: A B C A B C.

Between its rounds an engine is stopped (SIGSTOP to its whole tree), so that workers that spin while they wait use no CPU. A round in which
other processes used more than `FOREIGN_LIMIT` of the machine is repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import cpu
from benchmarks.cells import Cell
from benchmarks.engines import EngineSpec
from benchmarks.paths import LOGS, driver_environment, interpreter_of

FOREIGN_LIMIT = 0.04
WARM_S = 0.15
SETTLE_S = 0.02  # workers whose spinning is limited park within this time; others are stopped while they spin
START_LIMIT_S = 300.0
ANSWER_MARGIN_S = 120.0
HEADLINE_LETTERS = 200


class DriverError(RuntimeError):
    """An engine could not carry out a request; the text says why."""


class DriverProcess:
    """The process of one engine, and the tree below it."""

    def __init__(self, spec: EngineSpec, log_name: str) -> None:
        python = interpreter_of(spec.venv)
        if not python.exists():
            raise DriverError(f"environment {spec.venv!r} is not set up (make bench-setup)")
        LOGS.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        self.log = LOGS / f"{log_name}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=driver_environment(),
                start_new_session=True,
            )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            DriverError: the request failed, the driver died, or the answer took too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"op": op, **arguments}) + "\n").encode())
            self._process.stdin.flush()
        except OSError as exc:
            raise DriverError(f"the driver has ended: {self._last_log_line()}") from exc
        answer: dict[str, Any] = json.loads(self._read_line(time.monotonic() + timeout_s, op))
        if "error" in answer:
            raise DriverError(_headline(answer["error"]))
        return answer

    def freeze(self) -> None:
        """Stop the whole tree. It uses no CPU until `thaw`."""
        time.sleep(SETTLE_S)
        self._signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_tree(signal.SIGCONT)

    def end(self) -> None:
        """Ask the driver to close, then kill the rest of the tree."""
        self.thaw()
        with contextlib.suppress(DriverError):
            self.ask("close", 15.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._signal_tree(signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal_tree(self, number: signal.Signals) -> None:
        for pid in reversed(cpu.tree_of(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _read_line(self, deadline: float, op: str) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise DriverError(f"no answer to {op!r} in time: {self._last_log_line()}")
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    raise DriverError(f"the driver died in {op!r}: {self._last_log_line()}")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_log_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return _headline(lines[-1].strip()) if lines else "it left no message"


def _headline(text: str) -> str:
    # The log has the full text.
    line = text.strip().splitlines()[0]
    return line if len(line) <= HEADLINE_LETTERS else line[:HEADLINE_LETTERS] + "..."


@dataclass(frozen=True)
class Plan:
    """The length of a round in seconds, the required number of quiet rounds, and the maximum number of rounds."""

    seconds: float = 1.5
    rounds: int = 3
    max_rounds: int = 9


@dataclass
class Outcome:
    """The result of one engine in one cell."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    start_s: float | None = None
    failure: str | None = None

    def quiet(self) -> list[dict[str, float]]:
        return [one for one in self.rounds if one["foreign"] <= FOREIGN_LIMIT]

    def counted(self, wanted: int) -> list[dict[str, float]]:
        """Return the rounds that count: the quiet ones, or the `wanted` quietest if fewer are quiet."""
        quiet = self.quiet()
        return quiet if len(quiet) >= wanted else sorted(self.rounds, key=lambda one: one["foreign"])[:wanted]

    def value(self, wanted: int) -> float | None:
        """Return the median over the rounds that count."""
        counted = self.counted(wanted)
        return statistics.median(one["value"] for one in counted) if counted else None

    def is_noisy(self, wanted: int) -> bool:
        return bool(self.rounds) and len(self.quiet()) < wanted


def run_cell(cell: Cell, plan: Plan, say: Any) -> dict[str, Outcome]:
    """Run all engines of a cell. The failure of an engine is recorded in its outcome, and the other engines go on."""
    outcomes = {spec.name: Outcome() for spec in cell.engines}
    drivers: dict[str, DriverProcess] = {}
    try:
        for spec in cell.engines:
            _start(cell, spec, outcomes[spec.name], drivers)
        for number in range(plan.max_rounds):
            waiting = [name for name in drivers if len(outcomes[name].quiet()) < plan.rounds]
            if not waiting:
                break
            say(f"{cell.key}: round {number + 1}, {len(waiting)} engines")
            for name in waiting:
                _run_round(cell, plan, drivers, outcomes[name], name)
    finally:
        for driver in drivers.values():
            driver.end()
    return outcomes


def _start(cell: Cell, spec: EngineSpec, outcome: Outcome, drivers: dict[str, DriverProcess]) -> None:
    driver = None
    try:
        driver = DriverProcess(spec, f"{cell.key}-{spec.name}")
        answer = driver.ask(
            "start", START_LIMIT_S, adapter=spec.adapter, env=cell.env, num_envs=cell.num_envs, options=spec.options
        )
    except DriverError as exc:
        outcome.failure = str(exc)
        if driver is not None:
            driver.end()
        return
    except BaseException:
        if driver is not None:
            driver.end()
        raise
    outcome.start_s = answer["start_s"]
    driver.freeze()
    drivers[spec.name] = driver


def _run_round(cell: Cell, plan: Plan, drivers: dict[str, DriverProcess], outcome: Outcome, name: str) -> None:
    driver = drivers[name]
    driver.thaw()
    try:
        driver.ask("run", ANSWER_MARGIN_S, seconds=min(WARM_S, plan.seconds))
        before = cpu.read(driver.pid)
        answer = driver.ask("run", plan.seconds + ANSWER_MARGIN_S, seconds=plan.seconds)
        after = cpu.read(driver.pid)
    except DriverError as exc:
        outcome.failure = str(exc)
        drivers.pop(name).end()
        return
    driver.freeze()
    if cell.could_run is None:
        value = answer["steps"] / answer["wall_s"]
    else:
        value = answer["env_s"] / (answer["wall_s"] * cell.could_run)
    outcome.rounds.append({"value": value, "foreign": cpu.foreign_share(before, after), **answer})

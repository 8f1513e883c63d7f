"""Plays a program on a pool, and compares every result, error and state with the model."""

from __future__ import annotations

import tempfile
import traceback
import warnings

import stepmill
from stepmill.spec.errors import ClosedPoolError, UsageError
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.programs import Move, Program
from tests.fuzz.requests import Requests
from tests.fuzz.workers import Workers
from tests.pool_model.calls import Calls
from tests.pool_model.commands import Commands
from tests.pool_model.envs import env_fns
from tests.pool_model.results import require


class Player:
    """Plays one program, and closes its pool. `lines` gets the calls that were made, as Python."""

    def __init__(self, program: Program, folder: str, lines: list[str]) -> None:
        self._program = program
        arguments = program.kind, program.num_envs + program.num_spares, program.options["autoreset_mode"]
        options = ", ".join(f"{name}={value!r}" for name, value in program.options.items())
        lines.append(f"pool = stepmill.Pool(env_fns{(*arguments, 'a folder')}, {options})")
        self._pool = stepmill.Pool(env_fns(*arguments, folder), **program.options)
        self._calls = Calls(program, self._pool, lines)
        self._commands = Commands(self._calls)
        self._movers = (self._commands, Requests(self._calls, self._commands), Workers(self._calls), self)

    def play(self) -> None:
        """Make all calls, and those that bring the pool to its end."""
        with self._pool:
            self._commands.reset(None, seed=1)
            for move in self._program.moves:
                if self._calls.is_closed:
                    return
                self._calls.interrupt = move.interrupt
                self._make(move)
                self._calls.interrupt = 0
                self._calls.check()
            if not self._calls.is_closed:
                self._commands.bring_back()

    def _make(self, move: Move) -> None:
        mover = next(mover for mover in self._movers if hasattr(mover, move.name))
        getattr(mover, move.name)(**move.args)

    def mistake(self, which: int) -> None:
        """Make a wrong call, which must be refused and change nothing."""
        text, call = MISTAKES[which % len(MISTAKES)]
        self._calls.make(f"pool.{text}", lambda: call(self._pool), None, UsageError)

    def close(self) -> None:
        """Close the pool; what is called then is refused."""
        self._calls.lines.append("pool.close()")
        try:
            if self._calls.interrupt:
                self._calls.interrupted(self._pool.close)
        except KeyboardInterrupt:
            self._calls.lines[-1] += "  # Ctrl-C"
        self._pool.close()
        self._calls.is_closed = True
        for call in (self._pool.reset, self._pool.recv, lambda: self._pool.send([0]), lambda: self._pool.call("peek")):
            try:
                call()
            except ClosedPoolError:
                continue
            require(False, "a closed pool answers")


def play(program: Program) -> str | None:
    """Play a program; return the calls that it has made, and what was wrong, or None if nothing was."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Player(program, folder, lines).play()
        except AssertionError as error:
            return "\n".join([*lines, "", f"{type(error).__name__}: {error}"])
        except (Exception, KeyboardInterrupt):
            return "\n".join([*lines, "", traceback.format_exc()])
    return None

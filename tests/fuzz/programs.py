"""Draws random programs, and shrinks those that fail.

Not by Hypothesis, which takes 4 ms to draw a program, against 0.2 ms here and 10 ms to play one on the serial backend, and which gives
up a program that depends on timing as flaky, as programs in which processes die do. A program depends on its seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.pool_model.envs import BAD, HANG, KILL, ONCE, RAISE, STEP
from tests.pool_model.setup import Setup

BACKENDS = ("serial", "thread", "fork", "forkserver", "kernel")
MOVES = {
    "step": 8,
    "send": 10,
    "recv": 12,
    "reset": 4,
    "reset_async": 2,
    "peek": 2,
    "call_later": 2,
    "resolve": 2,
    "set_level": 2,
    "get_level": 1,
    "stumble": 1,
    "render": 1,
    "observe": 1,
    "revive": 1,
    "kill": 1,
    "save": 1,
    "restore": 1,
    "mistake": 2,
    "close": 0.2,
}


@dataclass(frozen=True)
class Move:
    """One or two calls of a program.

    Attributes:
        name: of the method of `Player` that makes them.
        args: its arguments.
        interrupt: at which line of stepmill's code Ctrl-C comes; 0 is never.
    """

    name: str
    args: dict[str, Any]
    interrupt: int = 0


@dataclass(frozen=True)
class Program(Setup):
    """A pool, and what is done with it."""

    moves: tuple[Move, ...] = ()

    def has(self, **options: Any) -> bool:
        """Whether the pool has these options."""
        return all(self.options.get(name) == value for name, value in options.items())


def draw_program(seed: int, backends: tuple[str, ...] = BACKENDS, max_moves: int = 40) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    backend = rng.choice(backends)
    num_envs = rng.randint(1, 4)
    kind = "kernel" if backend == "kernel" else rng.choice(["single"] * 5 + ["batched", "agents"])
    options = _draw_options(rng, backend, kind)
    verbs = _draw_verbs(rng, options, kind)
    if HANG in verbs:
        options["step_timeout_s"] = options["reset_timeout_s"] = 1.0
    moves = tuple(_draw_move(rng, num_envs, verbs) for _ in range(rng.randint(3, max_moves)))
    return Program(kind, num_envs, options, verbs, moves=moves)


def _draw_options(rng: random.Random, backend: str, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "backend": "process" if backend.startswith("fork") else backend,
        "autoreset_mode": rng.choice(["NextStep", "SameStep", "Disabled"]),
        "on_fault": rng.choice(["raise", "truncate"]),
        "seeding": rng.choice(["continue", "per_episode", "fixed"]),
        "restarts": {"restart_window_s": 0.02, "max_restarts": 10**6},
        "resets": {},
    }
    if options["backend"] == "process":
        options["context"] = backend
    if backend != "serial":
        options["num_workers"] = rng.randint(1, 3)
    if rng.random() < 0.2:
        options["copy"] = True
    if kind == "batched":
        options["seeding"] = "continue"  # rows of batched envs reset themselves
    elif rng.random() < 0.25:
        options["num_episodes"] = rng.randint(1, 3)
    if kind == "kernel":
        if rng.random() < 0.5:  # then a step of all envs needs no commands
            options |= {"autoreset_mode": "NextStep", "seeding": "continue"}
            options.pop("num_episodes", None)
        return options
    if rng.random() < 0.3 and kind != "batched":
        options |= {"on_fault": "replay", "seeding": "per_episode"}
    if rng.random() < 0.2:
        options["restarts"]["on_raise"] = rng.choice(["raise", "truncate"])
    if rng.random() < 0.2 and options["autoreset_mode"] != "SameStep":
        options["resets"]["spare_envs"] = rng.randint(1, 2)
    if rng.random() < 0.2 and options["autoreset_mode"] == "NextStep" and backend != "serial":
        options["resets"]["overlap"] = True
    return options


def _draw_verbs(rng: random.Random, options: dict[str, Any], kind: str) -> tuple[int, ...]:
    """Return what goes wrong in a program: in half of them nothing."""
    if rng.random() < 0.5:
        return ()
    if kind == "kernel":
        return (RAISE,)
    verbs = [RAISE, BAD]
    if options["backend"] == "process":
        verbs += [KILL] * rng.randint(0, 2)
        verbs += [HANG] * (rng.random() < 0.02)
    return tuple(verbs)


def _draw_action(rng: random.Random, verbs: tuple[int, ...]) -> int:
    verb = rng.choice(verbs) if verbs and rng.random() < 0.1 else STEP
    return verb + ONCE * rng.randrange(10**6)


def _draw_move(rng: random.Random, num_envs: int, verbs: tuple[int, ...]) -> Move:
    name = rng.choices(list(MOVES), list(MOVES.values()))[0]
    args: dict[str, Any] = {}
    everyone = range(num_envs)
    ids = sorted(rng.sample(everyone, rng.randint(1, num_envs)))
    if rng.random() < 0.3:
        rng.shuffle(ids)
    if name in ("step", "send"):
        args["actions"] = [_draw_action(rng, verbs) for _ in everyone for _ in range(2)]
    if name == "step":
        args["way"] = rng.choice(["step", "step_fast", "step_async"])
    elif name == "recv":
        args["how"] = rng.choice(["all", "count", "between", "ids", "ids", "ready", "at once", "out"])
        args["count"] = rng.randint(1, num_envs)
    elif name in ("reset", "reset_async"):
        args["seed"] = rng.choice([None, None, 5, {}, []]) if rng.random() < 0.7 else rng.randrange(2**20)
        args["bonus"] = rng.choice([None, None, None, rng.randrange(100)])
        args["persist"] = rng.choice([None, None, True])
        args["fault"] = rng.choice(verbs) + ONCE * rng.randrange(1, 10**6, 2) if verbs and rng.random() < 0.15 else STEP
    elif name == "set_level":
        args["levels"] = rng.choice([rng.randrange(50), [rng.randrange(50) for _ in everyone]])
    elif name == "revive":
        args["wait"], args["restart_living"] = rng.random() < 0.5, rng.random() < 0.3
    elif name in ("kill", "resolve", "restore", "mistake"):
        args["which"] = rng.randrange(100)
    if name in (
        "send",
        "recv",
        "reset",
        "reset_async",
        "peek",
        "call_later",
        "set_level",
        "get_level",
        "stumble",
        "render",
        "observe",
        "revive",
        "save",
    ):
        args["ids"] = None if rng.random() < 0.2 else ids
    if name in ("send", "reset", "reset_async") or (name == "recv" and args["how"] == "ids"):
        args["is_careless"] = rng.random() < 0.05
    interrupt = rng.randint(1, 60) if rng.random() < 0.03 and name not in ("kill", "mistake", "call_later") else 0
    return Move(name, args, interrupt)


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a program with as few moves, interrupts, faults and options as still fail."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _simplify(program):
            if fails(smaller):
                program, is_smaller = smaller, True
                break
    return program


def _simplify(program: Program) -> Iterator[Program]:
    moves = program.moves
    size = len(moves) // 2
    while size:
        for start in range(len(moves) - size, -1, -size):
            yield replace(program, moves=moves[:start] + moves[start + size :])
        size //= 2
    for at, move in enumerate(moves):
        if move.interrupt:
            yield replace(program, moves=(*moves[:at], replace(move, interrupt=0), *moves[at + 1 :]))
        actions = move.args.get("actions", ())
        for place, action in enumerate(actions):
            if action % ONCE:
                plain = {**move.args, "actions": [*actions[:place], 0, *actions[place + 1 :]]}
                yield replace(program, moves=(*moves[:at], replace(move, args=plain), *moves[at + 1 :]))
    for name in ("copy", "num_episodes"):
        if name in program.options:
            yield replace(program, options={key: value for key, value in program.options.items() if key != name})
    for record, leaf in (("restarts", "on_raise"), ("resets", "overlap"), ("resets", "spare_envs")):
        own = program.options.get(record, {})
        if leaf in own:
            rest = {key: value for key, value in own.items() if key != leaf}
            yield replace(program, options={**program.options, record: rest})

"""The targets of stepmill: one `Target` for each required ratio."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engines import PUFFERS

SYNC = ("stepmill-2w",)
BEST_SYNC = ("stepmill-2w", "stepmill-thread")
BEST = ("stepmill-2w", "stepmill-async")


@dataclass(frozen=True)
class Target:
    """A requirement on one cell: the best of `ours` is at least `factor` times the best of `theirs`, or at least `factor`.

    With `at_most` the value must not be larger (seconds, megabytes). `later` names what has to be built first.
    """

    cell: str
    ours: tuple[str, ...]
    factor: float
    theirs: tuple[str, ...] = ()
    at_most: bool = False
    unit: str = ""
    later: str = ""


def _row(
    cells: tuple[str, ...], ours: tuple[str, ...], factors: tuple[float, ...], theirs: tuple[str, ...]
) -> list[Target]:
    return [Target(cell, ours, factor, theirs) for cell, factor in zip(cells, factors, strict=True)]


_NOOP = ("noop-2", "noop-8", "noop-32", "noop-128")
_IMAGES = ("image84-8", "image84-32", "image210-8", "image210-32")
_REAL = ("cartpole-8", "cartpole-64", "halfcheetah-8", "pong-8")

TARGETS: tuple[Target, ...] = (
    *_row(_NOOP, SYNC, (6, 12, 35, 100), ("gym-async",)),
    Target("noop-128", SYNC, 4, PUFFERS),
    *_row(_NOOP, ("stepmill-1w",), (1, 2, 3, 5), ("puffer-1w",)),
    *_row(_NOOP, ("stepmill-serial",), (2, 2.5, 2.5, 3), ("gym-sync",)),
    Target("noop-128", ("stepmill-serial",), 0.6, ("bare",)),
    *_row(_NOOP, ("stepmill-deadlines",), (0.95,) * 4, SYNC),
    *_row(_NOOP, ("stepmill-replay",), (0.95,) * 4, SYNC),
    Target("noop-128", ("stepmill-8w",), 0.5, SYNC),
    *_row(_IMAGES, SYNC, (5, 15, 5, 8), ("gym-async-copy",)),
    Target("image84-32", SYNC, 1, PUFFERS),
    Target("sleep-32", ("stepmill-async-thread",), 0.84),
    Target("sleep-32", ("stepmill-async",), 0.84),
    Target("cpu-32", ("stepmill-async",), 0.92),
    Target("slowreset-16", ("stepmill-spares-async",), 0.90),
    Target("sleep-32", BEST_SYNC, 0.21),
    Target("cpu-32", SYNC, 0.82),
    Target("slowreset-16", ("stepmill-spares", "stepmill-spares-each"), 0.85),
    *_row(_REAL, BEST, (0.47, 0.88, 0.82, 0.93), ("ceiling",)),
    Target("halfcheetah-8", BEST, 1, ("envpool-sync", "envpool-async")),
    Target("frontends-32", ("sb3-stepmill",), 8, ("sb3",)),
    Target("frontends-32", ("tianshou-stepmill",), 8, ("tianshou",)),
    Target("frontends-32", ("multi-env",), 8, ("multi-env-pipes",)),
    Target("frontends-32", ("alf-arrays", "alf-tensors"), 0.7, SYNC),
    Target("diengine-32", ("stepmill-diengine",), 5, ("diengine",)),
    Target("diengine-32", ("stepmill-diengine-async",), 5, ("diengine-async",)),
    Target("frontends-32", ("torchrl-stepmill",), 20, ("torchrl",)),
    *_row(
        ("envpool-cartpole-8", "envpool-cartpole-32", "envpool-pong-8"),
        ("stepmill-envpool",),
        (1, 1, 1),
        ("torchrl-envpool",),
    ),
    *_row(
        ("envpool-cartpole-8", "envpool-cartpole-32", "envpool-pong-8"),
        ("stepmill-envpool",),
        (1, 1, 1),
        ("torchrl-envpool-resets",),
    ),
    *_row(("unity-4", "unity-32"), ("unity-manager",), (3, 3), ("unity-queue",)),
    Target("start-256", ("stepmill-fork",), 0.2, at_most=True, unit="s"),
    Target("start-256", ("stepmill-forkserver",), 1.5, at_most=True, unit="s"),
    Target("start-256", ("stepmill-spawn",), 3.0, at_most=True, unit="s"),
    Target("memory-256", ("stepmill-fork",), 0.3, at_most=True, unit="MB/env"),
    Target("memory-256", ("stepmill-forkserver",), 0.3, at_most=True, unit="MB/env"),
    Target("memory-256", ("stepmill-spawn",), 0.3, at_most=True, unit="MB/env"),
    Target("growth", ("stepmill-2w",), 1.0, at_most=True, unit="MB"),
)

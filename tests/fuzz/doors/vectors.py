"""Random vector envs beside Gymnasium's SyncVectorEnv: `tests/harness/trace.py` compares each value, with its type and dtype."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from stepmill.testing.sampled import DTYPES, box
from tests.harness.pools import make_vector_env
from tests.harness.trace import MASK, RESET, STEP, Story, compare_with_gymnasium


def draw_space(rng: random.Random, depth: int = 2) -> spaces.Space[Any]:
    """Return a random space."""
    kind = rng.choice(["box", "box", "discrete", "multi", "binary", "text", "sequence", "dict", "tuple"])
    if kind == "dict" and depth:
        return spaces.Dict({name: draw_space(rng, depth - 1) for name in rng.sample("abcd", rng.randint(1, 3))})
    if kind == "tuple" and depth:
        return spaces.Tuple([draw_space(rng, depth - 1) for _ in range(rng.randint(1, 3))])
    shape = tuple(rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 3)))
    leaves: dict[str, Any] = {
        "discrete": lambda: spaces.Discrete(rng.randint(1, 9), start=rng.choice([0, -3, 5])),
        "multi": lambda: spaces.MultiDiscrete([rng.randint(1, 5) for _ in range(rng.randint(1, 3))]),
        "binary": lambda: spaces.MultiBinary(rng.randint(1, 4)),
        "text": lambda: spaces.Text(rng.randint(1, 12)),
        "sequence": lambda: spaces.Sequence(spaces.Box(0, 1, (2,)), stack=rng.random() < 0.5),
    }
    large = (rng.choice([60, 90]), 90, 3)  # large enough to be lent
    return leaves.get(kind, lambda: box(rng.choice(DTYPES), large if rng.random() < 0.1 else shape))()


def play(number: int, folder: Path) -> None:
    """Play the vector env of a number."""
    rng = random.Random(number)
    num_envs = rng.randint(1, 4)
    options = [None, None, {}, {"level": 3, "start": np.arange(3)}]
    acts = [
        (rng.choice([STEP] * 7 + [MASK, RESET]), rng.randrange(2**20), rng.choice(options))
        for _ in range(rng.randint(4, 40))
    ]
    seeds = [rng.choice([None, rng.randrange(2**31)]) for _ in range(num_envs)]
    seed: Any = rng.choice([None, rng.randrange(2**31), seeds])
    story = Story(draw_space(rng), draw_space(rng), num_envs, rng.choice([*AutoresetMode]), seed, acts)
    where = rng.choice(["serial"] * 6 + ["thread"] * 3 + ["fork"])
    compare_with_gymnasium(story, partial(make_vector_env, where))

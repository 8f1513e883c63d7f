"""reasoning-gym's datasets: an episode is one question and one answer.

`reset(options={"index": i})` asks question i. Without the option, the env draws a question, and `info["index"]` is its
index. The reward is the result of `score_answer`, and the `info` of the step has the dataset's own `answer`.
`dataset[index]["metadata"]` has further data of the question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepmill.envs.env_adapter import EnvAdapter
from stepmill.envs.gymnasium import describe_opaque

describe = describe_opaque


class QuestionEnv(EnvAdapter):
    """Asks the questions of a dataset for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[object, dict[str, object]]:
        """Ask a question."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        drawn = int(self._rng.integers(len(self.env)))
        self._index = int((options or {}).get("index", drawn))
        self._entry = self.env[self._index]
        return self._entry["question"], {"index": self._index}

    def step(self, action: object) -> tuple[object, float, bool, bool, dict[str, object]]:
        """Score an answer, which ends the episode."""
        score = float(self.env.score_answer(action, self._entry))
        return self._entry["question"], score, True, False, {"index": self._index, "answer": self._entry["answer"]}


adapt = QuestionEnv

"""textarena's games: each turn shows a text, and the action is a text in reply.

`reset(options={"num_players": 2})` sets the number of players, which is 1 by default. Each step is the turn of one
player, `info["player_id"]`. The step that ends a game for one player has its reward. In games for several players the
reward is 0, and `info["rewards"]` has the rewards of all players. `info["game"]` has textarena's info of each player.

textarena draws from Python's global generator. Here each env has its own state of that generator, which no other env of
its process changes, so that a seed determines a game, even when it is replayed. Games of one process therefore take
turns.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stepmill.envs.env_adapter import EnvAdapter
from stepmill.envs.gymnasium import describe_opaque

_GENERATOR_LOCK = threading.Lock()  # envs may run in several threads

describe = describe_opaque


class TextArenaEnv(EnvAdapter):
    """Steps a game for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._unplayed = env
        self._random_state: tuple[Any, ...] | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[object, dict[str, object]]:
        """Begin a game."""
        num_players = (options or {}).get("num_players", 1)
        with self._own_random_state():
            self.env = copy.deepcopy(self._unplayed)  # games and wrappers keep parts of the previous game
            self.env.reset(num_players=num_players, seed=seed)
            return self._turn({})

    def step(self, action: object) -> tuple[object, float, bool, bool, dict[str, object]]:
        """Take the turn of the current player."""
        with self._own_random_state():
            is_over, info = self.env.step(action=action)
            if not is_over:
                obs, info = self._turn(info)
                return obs, 0.0, False, False, info
            rewards, game = self.env.close()
        reward = float(rewards[0]) if len(rewards) == 1 else 0.0
        return "", reward, True, False, {**info, "rewards": _by_name(rewards), "game": _by_name(game)}

    def close(self) -> None:
        """Do nothing, because `close` of textarena ends a game and returns its rewards."""

    def _turn(self, info: Mapping[str, object]) -> tuple[object, dict[str, object]]:
        player_id, obs = self.env.get_observation()
        return obs, {**info, "player_id": player_id}

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        with _GENERATOR_LOCK:
            of_others = random.getstate()
            if self._random_state is not None:
                random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(of_others)


adapt = TextArenaEnv


def _by_name(of_players: Mapping[int, object]) -> dict[str, object]:
    return {str(player_id): value for player_id, value in of_players.items()}

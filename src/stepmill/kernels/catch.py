"""A game with images: a ball falls, and a paddle must catch it. Observations are four frames of 84 x 84 grey pixels."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from gymnasium import spaces

from stepmill.kernels.python import PythonKernel, kernel

_SIZE = 84
_NUM_FRAMES = 4
_BALL = 4  # pixels, each way
_PADDLE = 12  # pixels wide, 2 high
_SPEED = 3


def _draw(obs: Any, frame: int, ball_x: int, ball_y: int, paddle_x: int) -> None:
    if not (0 <= ball_x <= _SIZE - _BALL and 0 <= ball_y <= _SIZE - _BALL and 0 <= paddle_x <= _SIZE - _PADDLE):
        raise IndexError("the action or the state is out of range")
    for row in range(ball_y, ball_y + _BALL):
        for column in range(ball_x, ball_x + _BALL):
            obs[row, column, frame] = 255
    for row in range(_SIZE - 2, _SIZE):
        for column in range(paddle_x, paddle_x + _PADDLE):
            obs[row, column, frame] = 128


@kernel(
    observation_space=spaces.Box(0, 255, (_SIZE, _SIZE, _NUM_FRAMES), np.uint8),
    action_space=spaces.Discrete(3),
    state=np.dtype([("ball_x", "i4", (4,)), ("ball_y", "i4", (4,)), ("paddle_x", "i4", (4,)), ("drift", "i4")]),
)
class catch:  # noqa: N801
    """Catch84-v0: +1 for a ball that is caught, -1 for one that is not. The newest frame is the last one."""

    def reset(state: Any, rng: Any, obs: Any) -> None:
        ball_x = rng.integers(0, _SIZE - _BALL + 1)
        paddle_x = rng.integers(0, _SIZE - _PADDLE + 1)
        state.drift = rng.integers(-1, 2)
        obs[:] = 0
        for frame in range(_NUM_FRAMES):
            state.ball_x[frame] = ball_x
            state.ball_y[frame] = 0
            state.paddle_x[frame] = paddle_x
            _draw(obs, frame, ball_x, 0, paddle_x)

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        if not 0 <= action <= 2:
            raise IndexError("the action must be 0, 1 or 2")
        for frame in range(_NUM_FRAMES - 1):
            state.ball_x[frame] = state.ball_x[frame + 1]
            state.ball_y[frame] = state.ball_y[frame + 1]
            state.paddle_x[frame] = state.paddle_x[frame + 1]
        last = _NUM_FRAMES - 1
        ball_x = state.ball_x[last] + state.drift
        if ball_x < 0 or ball_x > _SIZE - _BALL:
            state.drift = -state.drift
            ball_x += 2 * state.drift
        ball_y = min(state.ball_y[last] + _SPEED, _SIZE - _BALL)
        paddle_x = min(max(state.paddle_x[last] + (action - 1) * _SPEED, 0), _SIZE - _PADDLE)
        state.ball_x[last] = ball_x
        state.ball_y[last] = ball_y
        state.paddle_x[last] = paddle_x
        obs[:] = 0
        for frame in range(_NUM_FRAMES):
            _draw(obs, frame, state.ball_x[frame], state.ball_y[frame], state.paddle_x[frame])
        if ball_y < _SIZE - _BALL:
            return 0.0, False, False
        is_caught = ball_x + _BALL > paddle_x and ball_x < paddle_x + _PADDLE
        return (1.0 if is_caught else -1.0), True, False


def make_catch() -> PythonKernel:
    """Return the kernel of Catch84-v0."""
    return cast("PythonKernel", catch)

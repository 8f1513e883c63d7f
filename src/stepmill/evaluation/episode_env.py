"""The env in a worker, if tasks have envs of their own or videos are made: each reset says which episode begins."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from stepmill import UsageError
from stepmill.evaluation.settings import Success

ORDER = "stepmill.evaluate"  # the key of the reset option that says which episode begins
SUCCESS_NAMES = ("is_success", "success")
_FPS = 30


@dataclass(frozen=True)
class EpisodeOrder:
    """Which env a reset is for, and where its video is written: None writes none.

    Attributes:
        maker: index of the env function.
        video: path of the file.
        is_failure_wanted: write it only if the episode is not successful.
    """

    maker: int
    video: str | None
    is_failure_wanted: bool


def find_success(info: Mapping[str, Any], success: Success) -> bool | None:
    """Return whether the last info of an episode says that it was successful; None if the env does not say.

    Raises:
        UsageError: the info has no such name.
    """
    if callable(success):
        return bool(success(dict(info)))
    for name in SUCCESS_NAMES if success is None else (success,):
        if name in info:
            return bool(info[name])
    if success is None:
        return None
    raise UsageError(
        f"success={success!r} is not in the info at the end of an episode, which has {sorted(map(str, info))}; give another "
        "name, or a function of the info"
    )


class EpisodeEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env that becomes the env of another task when a reset says so, and that can record an episode."""

    def __init__(self, makers: Sequence[Callable[[], object]], success: Success) -> None:
        self._makers = makers
        self._success = success
        self._maker = 0
        self._video: _Video | None = None
        super().__init__(cast("gymnasium.Env[Any, Any]", makers[0]()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the episode that the options order; the env gets the other options."""
        options = dict(options or {})
        order: EpisodeOrder | None = options.pop(ORDER, None)
        self._video = None
        if order is not None:
            self._change_env(order.maker)
            if order.video is not None:
                self._video = _Video(order.video, order.is_failure_wanted, self._success)
        result = self.env.reset(seed=seed, options=options or None)
        if self._video is not None:
            self._video.add(self.env.render())
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, and write the video at the end of the episode."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self._video is not None:
            self._video.add(self.env.render())
            if terminated or truncated:
                self._video.finish(info, self.env.metadata.get("render_fps", _FPS))
                self._video = None
        return obs, reward, terminated, truncated, info

    def _change_env(self, maker: int) -> None:
        if maker == self._maker:
            return
        env = cast("gymnasium.Env[Any, Any]", self._makers[maker]())
        for name in ("observation_space", "action_space"):
            if getattr(env, name) != getattr(self, name):
                text = f"the {name} of task {maker} is {getattr(env, name)}, and that of the first task {getattr(self, name)}"
                env.close()
                raise UsageError(f"{text}; evaluate tasks with other spaces by themselves")
        self.env.close()
        self.env, self._maker = env, maker


class _Video:
    """The frames of one episode, compressed, until it is known whether they are wanted."""

    def __init__(self, path: str, is_failure_wanted: bool, success: Success) -> None:
        self._path = Path(path)
        self._is_failure_wanted = is_failure_wanted
        self._success = success
        self._frames: list[tuple[tuple[int, ...], bytes]] = []

    def add(self, frame: Any) -> None:
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise UsageError(
                "videos need envs whose render() returns [height, width, 3] of uint8; use render_mode='rgb_array'"
            )
        self._frames.append((frame.shape, zlib.compress(frame.tobytes(), 1)))

    def finish(self, info: Mapping[str, Any], fps: int) -> None:
        """Write the file, if it is wanted. It has its name when it is whole."""
        if self._is_failure_wanted:
            success = find_success(info, self._success)
            if success is None:
                raise UsageError(
                    f"the env does not say whether an episode was successful (no {' or '.join(SUCCESS_NAMES)} in its info), so that "
                    "failures cannot be recorded; give success="
                )
            if success:
                return
        from stepmill.observe.video import VideoFile

        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f".{self._path.name}")
        with VideoFile(scratch, fps=fps) as video:
            for shape, data in self._frames:
                frame: NDArray[np.uint8] = np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)
                video.write(frame)
        scratch.replace(self._path)

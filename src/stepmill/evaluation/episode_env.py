"""The env in a worker, if tasks have their own envs or videos are made: each reset says which episode begins."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import gymnasium
import numpy as np

from stepmill import UsageError
from stepmill.evaluation.plan import Success
from stepmill.observe.video import FPS, VideoFile, tile

logger = logging.getLogger("stepmill")

ORDER = "stepmill.evaluate"  # the key of the reset option that says which episode begins
SUCCESS_NAMES = ("is_success", "success")


@dataclass(frozen=True)
class EpisodeOrder:
    """The env that a reset is for, and the path of its video; None writes no video.

    Attributes:
        maker: the index of the env function.
        video: the path of the file.
        is_failure_wanted: whether the video is written only if the episode is not successful.
    """

    maker: int
    video: str | None
    is_failure_wanted: bool


def find_success(info: Mapping[str, Any], success: Success) -> bool | None:
    """Return whether the last info of an episode says that it was successful; None if the env does not say.

    Raises:
        UsageError: the info has no such name, or its value is not a truth value.
    """
    if callable(success):
        return _as_success("the result of `success`", success(dict(info)))
    found = [name for name in (SUCCESS_NAMES if success is None else (success,)) if name in info]
    if found or success is None:
        return _as_success(f"the info {found[0]!r}", info[found[0]]) if found else None
    known = f"the info at the end of an episode has {sorted(map(str, info))}"
    raise UsageError(f"success={success!r}, but {known}; give another name, or a function of the info")


def _as_success(name: str, value: object) -> bool | None:
    """Return a number, or an array of one number, as a bool. None and NaN do not say whether an episode was successful."""
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # its parts differ in shape
        array = np.empty(0)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise UsageError(f"{name} is {value!r}, and not true, false or None; give success= a function of the info")
    item = array.item()
    return None if item != item else bool(item)


class EpisodeEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env that becomes the env of another task when a reset says so, and that can record an episode."""

    def __init__(self, makers: Sequence[Callable[[], object]], success: Success) -> None:
        self._makers, self._success, self._order = makers, success, EpisodeOrder(0, None, is_failure_wanted=False)
        self._frames: list[tuple[tuple[int, ...], bytes]] = []  # shapes, and compressed pixels
        super().__init__(cast("gymnasium.Env[Any, Any]", makers[0]()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the episode that the options name; the env gets the other options."""
        options = dict(options or {})
        order = options.pop(ORDER, self._order)
        if order.maker != self._order.maker:
            self._change_env(order.maker)
        self._order, self._frames = order, []
        result = self.env.reset(seed=seed, options=options or None)
        self._add_frame()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, and write the video at the end of the episode."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._add_frame()
        if self._order.video is not None and (terminated or truncated):
            if not self._order.is_failure_wanted or self._has_failed(info):
                self._write(Path(self._order.video))
            self._frames = []
        return obs, reward, terminated, truncated, info

    def _change_env(self, maker: int) -> None:
        env = cast("gymnasium.Env[Any, Any]", self._makers[maker]())
        own, wanted = ((each.observation_space, each.action_space) for each in (env, self))
        if own != wanted:
            env.close()
            raise ValueError(f"task {maker} has the spaces {own}, and the first task {wanted}; evaluate it by itself")
        old, self.env = self.env, env
        try:
            old.close()
        except Exception:
            logger.warning("an env raised an exception in close(); it counts as closed", exc_info=True)

    def _add_frame(self) -> None:
        if self._order.video is not None:
            picture = tile([self.env.render()])
            self._frames.append((picture.shape, zlib.compress(picture.tobytes(), 1)))

    def _has_failed(self, info: Mapping[str, Any]) -> bool:
        success = find_success(info, self._success)
        if success is None:
            known = f"no {' or '.join(SUCCESS_NAMES)}" if self._success is None else "no value for `success`"
            raise UsageError(f"record='failures', but the last info of an episode has {known}; give another success=")
        return not success

    def _write(self, path: Path) -> None:
        """Write the file. It gets its name when it is complete, and is written in a private folder: others may write to its own."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".stepmill-", dir=path.parent) as folder:
            scratch = Path(folder, f"video{path.suffix}")
            with VideoFile(scratch, fps=self.env.metadata.get("render_fps", FPS)) as video:
                for shape, data in self._frames:
                    video.write(np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape))
            scratch.replace(path)

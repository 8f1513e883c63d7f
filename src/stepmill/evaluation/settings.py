"""The arguments of `evaluate` that have defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepmill import MissingExtraError, UsageError

Success: TypeAlias = "str | Callable[[dict[str, Any]], object] | None"
_FIXED_ROWS = 32


if TYPE_CHECKING:
    from stepmill.spec.options import OptionKeywords

    class EvaluateKeywords(OptionKeywords, total=False):
        """The fields of `EvaluateOptions` and of `PoolOptions` as keyword arguments."""

        success: Success
        infos: Sequence[str]
        retries: int
        batch_size: int | Literal["fixed"] | None
        resume: str | os.PathLike[str] | None
        videos: str | os.PathLike[str] | None
        record: Literal["all", "failures"] | int
        progress: bool


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """How `evaluate` counts, and what it writes. Each field is a keyword of `evaluate`.

    Attributes:
        success: the name of the info, or a function of the last step's info, that says whether an episode was successful.
            None is "is_success" or "success", if the env has it.
        infos: names of infos of the last step that `Episode.infos` keeps.
        retries: how often an episode that ended in a fault of its env is begun again. Then it is listed with the fault.
        batch_size: how many rows the policy gets. None is as many envs as are ready. A number of at least num_envs,
            or "fixed" for 32, fills the rows up (with episode_id -1), because networks round differently for other numbers of rows.
        resume: a file to which each finished episode is appended at once. If it exists, episodes that are in it are not
            played again. It does not know the policy: use one file for each.
        videos: a folder for a video of each episode, `TASK-SEED.mp4`; it is made if missing. Frames are rendered in the workers.
        record: which videos: "all", "failures" (episodes that are not successful), or only the first k episodes of all.
        progress: show a bar on stderr, if it is a terminal.
    """

    success: Success = None
    infos: Sequence[str] = ()
    retries: int = 2
    batch_size: int | Literal["fixed"] | None = None
    resume: str | os.PathLike[str] | None = None
    videos: str | os.PathLike[str] | None = None
    record: Literal["all", "failures"] | int = "all"
    progress: bool = True

    def __post_init__(self) -> None:
        if self.record not in ("all", "failures") and (not isinstance(self.record, int) or self.record < 0):
            raise UsageError(f"record={self.record!r} is not 'all', 'failures', or a number of episodes")
        if self.batch_size not in (None, "fixed") and (not isinstance(self.batch_size, int) or self.batch_size < 1):
            raise UsageError(f"batch_size={self.batch_size!r} is not a number, 1 or more, 'fixed', or None")
        if self.videos is not None and find_spec("imageio_ffmpeg") is None:
            raise MissingExtraError(module="imageio_ffmpeg", extra="video")

    @property
    def num_rows(self) -> int | None:
        """How many rows each call of the policy has; None is as many as there are."""
        return _FIXED_ROWS if self.batch_size == "fixed" else self.batch_size

    def video_of(self, episode_id: int, name: str) -> str | None:
        """Return the path of an episode's video, or None."""
        if self.videos is None or (isinstance(self.record, int) and episode_id >= self.record):
            return None
        return str(Path(self.videos).absolute() / f"{name}.mp4")

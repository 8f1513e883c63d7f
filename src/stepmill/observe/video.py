"""Pictures of many envs: a grid of their frames, and videos of the grid or of each env. Only this file imports imageio_ffmpeg."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import MissingExtraError, UsageError

Frame = NDArray[np.uint8]
EXTRA = "video"
FPS = 30


def tile(frames: Sequence[object], *, columns: int | None = None) -> Frame:
    """Return one picture [height, width, 3] uint8 of frames side by side, row by row. Gaps are black.

    Args:
        frames: one or more arrays [h, w, 3] uint8, for example the results of `pool.render()`. Sizes may differ.
        columns: the number of frames in a row, 1 or more; None makes the grid about square.
    Raises:
        UsageError: there is no frame, a frame is not a picture, or `columns` is below 1.
    """
    if not frames:
        raise UsageError("there are no frames to show; name at least one env")
    pictures = [_checked(place, frame) for place, frame in enumerate(frames)]
    if columns is not None and columns < 1:
        raise UsageError(f"columns={columns} must be 1 or more")
    columns = min(columns or math.ceil(math.sqrt(len(frames))), len(frames))
    height, width = (max(frame.shape[axis] for frame in pictures) for axis in (0, 1))
    picture = np.zeros((-(-len(frames) // columns) * height, columns * width, 3), np.uint8)
    for place, frame in enumerate(pictures):
        row, column = divmod(place, columns)
        top, left = row * height, column * width
        picture[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    return picture


def _checked(place: int, frame: object) -> Frame:
    if isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8:
        return frame
    raise UsageError(
        f"frame {place} is {_describe(frame)} and not a picture [height, width, 3] of uint8; make the envs with "
        "render_mode='rgb_array'"
    )


def _describe(frame: object) -> str:
    return f"an array {frame.shape} of {frame.dtype}" if isinstance(frame, np.ndarray) else f"a {type(frame).__name__}"


class VideoFile(CloseAtEnd):
    """Writes frames to a video file, by ffmpeg. Use it as a context manager.

    The video has the size of the first frame: larger frames are cut off, smaller ones are padded with black.
    """

    def __init__(self, path: str | Path, *, fps: int = FPS) -> None:
        """Prepare the file. Nothing is written before the first frame.

        Args:
            path: the path of the file, whose ending determines the format.
            fps: frames per second.
        Raises:
            MissingExtraError: imageio-ffmpeg is not installed.
        """
        if find_spec("imageio_ffmpeg") is None:
            raise MissingExtraError(module="imageio_ffmpeg", extra=EXTRA)
        self._path = Path(path)
        self._fps = fps
        self._writer: GeneratorType[None, Any, None] | None = None
        self._size = (0, 0)  # height and width

    def write(self, frame: Frame) -> None:
        """Append a frame [height, width, 3] of uint8.

        Raises:
            UsageError: the file cannot be written in the format of its ending.
        """
        if self._writer is None:
            self._size = frame.shape[0], frame.shape[1]
        height, width = (size + size % 2 for size in self._size)  # codecs need even sizes
        frame = frame[:height, :width]
        frame = np.pad(frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)))
        try:
            if self._writer is None:
                self._writer = self._open(width, height)
            self._writer.send(np.ascontiguousarray(frame))
        except (OSError, RuntimeError) as exc:
            self._writer = None
            reason = str(exc).partition("\n")[0]
            raise UsageError(f"cannot write the video {str(self._path)!r}: {reason}; choose another path") from exc

    def _open(self, width: int, height: int) -> GeneratorType[None, Any, None]:
        from imageio_ffmpeg import write_frames

        if not self._path.parent.is_dir():
            raise UsageError(f"the folder of the video {str(self._path)!r} does not exist; make it first")
        writer: GeneratorType[None, Any, None] = write_frames(
            self._path, (width, height), fps=self._fps, macro_block_size=2, ffmpeg_log_level="error"
        )
        writer.send(None)  # starts ffmpeg
        return writer

    def close(self) -> None:
        """Finish the file. Idempotent.

        Raises:
            UsageError: ffmpeg could not write the end of the file.
        """
        writer, self._writer = self._writer, None
        if writer is None or writer.gi_frame is None:  # it has ended
            return
        process = writer.gi_frame.f_locals.get("p")  # imageio_ffmpeg does not say how ffmpeg has ended
        writer.close()
        if process is not None and process.returncode:
            raise UsageError(
                f"the video {str(self._path)!r} is incomplete: ffmpeg ended with status {process.returncode}, and stderr says why; "
                "choose a path on a disk that has room"
            )


class Recorder(CloseAtEnd):
    """Writes a grid of all envs to one file, or each env to a separate file. Use it as a context manager."""

    def __init__(self, path: str | Path | None, folder: str | Path | None, num_envs: int) -> None:
        """Prepare files: `path` for the grid, and `folder/env-0.mp4`, ... for each env; None writes none.

        Raises:
            MissingExtraError: imageio-ffmpeg is not installed.
        """
        self._grid = None if path is None else VideoFile(path)
        paths = [] if folder is None else [Path(folder) / f"env-{env_id}.mp4" for env_id in range(num_envs)]
        self._each = [VideoFile(each) for each in paths]

    def add(self, render: Callable[[], Sequence[Any]]) -> None:
        """Render all envs, and write their frames.

        Raises:
            UsageError: an env does not return a picture, or a file cannot be written.
        """
        frames = render()
        picture = tile(frames)
        if self._grid is not None:
            self._grid.write(picture)
        for file, frame in zip(self._each, frames, strict=False):
            file.write(frame)

    def close(self) -> None:
        """Finish all files, also if one of them raises a UsageError, because it is incomplete. Idempotent."""
        with ExitStack() as stack:
            for file in (*self._each, *([] if self._grid is None else [self._grid])):
                stack.callback(file.close)

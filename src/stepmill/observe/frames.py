"""Frames of envs in a terminal. A character shows two pixels: the upper half of its cell has one colour, the lower the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from stepmill.observe.video import Frame, tile
from stepmill.spec.errors import UsageError

UPPER_HALF = "▀"
INTERVAL_S = 0.2
MIN_COLUMNS = 20  # of one env
MIN_LINES = 8
NUM_STYLES = 1 << 14


def require_colours(console: Console) -> None:
    """Check that a console can show frames.

    Raises:
        UsageError: it is not a terminal, or has no colours or no block characters.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError("--frames needs a terminal; use --video FILE to write a video")
    if console.color_system is None or console.options.ascii_only:
        raise UsageError("--frames needs a terminal with colours and UTF-8; use --video FILE to write a video")


class FramePicture:
    """A rich renderable: one picture, scaled down to `columns` x `num_lines` characters at most."""

    def __init__(self, picture: Frame, columns: int, num_lines: int) -> None:
        self._pixels = shrink(picture, columns, 2 * num_lines)

    @property
    def num_lines(self) -> int:
        """How many lines of the terminal it takes."""
        return len(self._pixels) // 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for upper, lower in zip(self._pixels[0::2].tolist(), self._pixels[1::2].tolist(), strict=True):
            for above, below in zip(upper, lower, strict=True):
                yield Segment(UPPER_HALF, _style(tuple(above), tuple(below)))
            yield Segment.line()


def shrink(picture: Frame, width: int, height: int) -> Frame:
    """Return a picture of at most `width` x `height` pixels, with the same shape and an even height, by means of areas.

    Smaller pictures keep their size, and get a black line below if their height is odd.
    """
    factor = max(1.0, picture.shape[1] / width, picture.shape[0] / height)
    for axis in (0, 1):
        size = max(1, int(picture.shape[axis] / factor))
        starts = np.arange(size) * picture.shape[axis] // size
        counts = np.diff(starts, append=picture.shape[axis])
        sums = np.add.reduceat(picture, starts, axis=axis, dtype=np.uint32)
        picture = (sums // counts.reshape([-1 if each == axis else 1 for each in range(3)])).astype(np.uint8)
    return np.pad(picture, ((0, picture.shape[0] % 2), (0, 0), (0, 0)))


@lru_cache(maxsize=NUM_STYLES)
def _style(above: tuple[int, ...], below: tuple[int, ...]) -> Style:
    return Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below))


class FrameSampler:
    """Renders some envs a few times a second, as many as fit on the screen, and hands their picture to a view."""

    def __init__(self, num_envs: int, columns: int, num_lines: int, show: Callable[[FramePicture], None]) -> None:
        """Divide a part of the screen of `columns` x `num_lines` characters among envs."""
        self._columns, self._num_lines = columns, num_lines
        self._grid_columns = max(1, columns // MIN_COLUMNS)
        self._env_ids = list(range(min(num_envs, self._grid_columns * max(1, num_lines // MIN_LINES))))
        self._show = show
        self._due_s = 0.0

    def sample(self, render: Callable[[Sequence[int]], Sequence[object]]) -> None:
        """Render the envs if their picture is older than INTERVAL_S.

        Args:
            render: `pool.render`. Called while no env steps.
        Raises:
            UsageError: an env returns no picture.
        """
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        picture = tile(render(self._env_ids), columns=self._grid_columns)
        self._show(FramePicture(picture, self._columns, self._num_lines))

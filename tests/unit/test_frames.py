"""Frames of envs as characters of a terminal."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from rich.console import Console

from stepmill.observe import frames
from stepmill.observe.frames import FramePicture, FrameSampler, require_colours, shrink
from stepmill.spec.errors import UsageError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def solid(height, width, colour):
    return np.full((height, width, 3), colour, np.uint8)


def terminal(**changes):
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    return Console(**{"file": file, "force_terminal": True, "color_system": "truecolor", "width": 80, **changes})


def draw(picture):
    console = terminal()
    with console.capture() as capture:
        console.print(picture, end="")
    return capture.get()


def test_a_character_shows_two_pixels_one_above_the_other():
    text = draw(FramePicture(np.concatenate([solid(1, 3, RED), solid(1, 3, BLUE)]), 80, 24))
    assert text.count("▀") == 3
    assert "38;2;255;0;0;48;2;0;0;255m▀" in text
    assert FramePicture(solid(9, 3, RED), 80, 24).num_lines == 5


@pytest.mark.parametrize(
    ("shape", "limits", "expected"),
    [
        ((400, 600), (80, 40), (40, 60)),
        ((210, 160), (80, 40), (40, 30)),
        ((100, 1000), (80, 40), (8, 80)),
        ((3, 3), (80, 40), (4, 3)),
        ((1000, 1), (80, 40), (40, 1)),
        ((10, 10), (1, 2), (2, 1)),
    ],
)
def test_a_picture_fits_and_keeps_its_shape(shape, limits, expected):
    small = shrink(solid(*shape, RED), *limits)
    assert small.shape == (*expected, 3)
    assert small[0, 0].tolist() == list(RED)


def test_a_pixel_is_the_mean_of_its_area():
    picture = np.concatenate([solid(8, 4, (100, 0, 0)), solid(8, 4, (200, 0, 0))], axis=1)
    assert shrink(picture, 1, 8)[0, 0].tolist() == [150, 0, 0]


@pytest.mark.parametrize(
    ("num_envs", "columns", "num_lines", "num_shown"),
    [(64, 80, 10, 4), (64, 160, 36, 32), (2, 80, 10, 2), (64, 10, 1, 1)],
)
def test_as_many_envs_are_rendered_as_fit_on_the_screen(num_envs, columns, num_lines, num_shown):
    asked, shown = [], []
    sampler = FrameSampler(num_envs, columns, num_lines, shown.append)
    sampler.sample(lambda env_ids: asked.append(list(env_ids)) or [solid(40, 40, RED)] * len(env_ids))
    assert asked == [list(range(num_shown))]
    assert shown[0].num_lines <= num_lines


def test_frames_are_rendered_a_few_times_a_second_only(monkeypatch):
    clock = itertools.count(100.0, frames.INTERVAL_S / 3.9)
    monkeypatch.setattr(frames.time, "monotonic", lambda: next(clock))
    shown = []
    sampler = FrameSampler(1, 80, 10, shown.append)
    for _ in range(9):
        sampler.sample(lambda env_ids: [solid(4, 4, RED)])
    assert len(shown) == 3


@pytest.mark.parametrize(
    "changes", [{"force_terminal": False}, {"color_system": None}, {"file": io.TextIOWrapper(io.BytesIO(), "ascii")}]
)
def test_a_terminal_that_cannot_show_frames_is_refused_with_the_way_out(changes):
    with pytest.raises(UsageError, match="--video FILE"):
        require_colours(terminal(**changes))


def test_a_terminal_with_colours_is_accepted():
    require_colours(terminal())

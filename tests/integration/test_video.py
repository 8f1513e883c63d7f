"""Grids of frames, and videos by `stepmill run`."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from stepmill.observe.video import Recorder, VideoFile, tile
from stepmill.spec.errors import UsageError
from tests.harness.commands import run_command
from tests.harness.hangs import HANG_GUARD_S

MY_ENVS = """
import gymnasium, numpy as np
class Coloured(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}
    def render(self):
        return np.full((33, 47, 3), 200, np.uint8)
class Blind(Coloured):
    def render(self):
        return None
gymnasium.register("Coloured-v0", Coloured)
gymnasium.register("Blind-v0", Blind)
"""


def solid(height, width, value):
    return np.full((height, width, 3), value, np.uint8)


def read_video(path, width, height):
    """Return the frames of a video of this size."""
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    pixels = subprocess.run(command, capture_output=True, check=True, timeout=HANG_GUARD_S).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3)


def test_frames_are_placed_row_by_row_and_gaps_are_black():
    picture = tile([solid(2, 3, 10), solid(2, 3, 20), solid(1, 2, 30)])
    assert picture.shape == (4, 6, 3)
    assert picture[0, 0, 0] == 10
    assert picture[0, 3, 0] == 20
    assert picture[2, 1, 0] == 30
    assert picture[3, 0, 0] == picture[2, 2, 0] == picture[2, 3, 0] == 0


def test_the_number_of_columns_may_be_given():
    assert tile([solid(2, 3, 1)] * 4, columns=4).shape == (2, 12, 3)
    assert tile([solid(2, 3, 1)] * 2, columns=9).shape == (2, 6, 3)


@pytest.mark.parametrize(
    ("frames", "columns", "text"),
    [
        ([], None, "no frames"),
        ([None], None, "frame 0 is a NoneType"),
        ([np.zeros((2, 2))], None, r"an array \(2, 2\) of float64"),
        ([solid(1, 1, 0)], 0, "columns=0"),
    ],
)
def test_what_is_no_picture_is_refused(frames, columns, text):
    with pytest.raises(UsageError, match=text):
        tile(frames, columns=columns)


def test_a_video_has_the_frames_that_were_written_with_an_even_size(tmp_path):
    with VideoFile(tmp_path / "v.mp4") as video:
        for value in (0, 100, 200):
            video.write(solid(33, 47, value))
    frames = read_video(tmp_path / "v.mp4", 48, 34)
    assert [round(float(frame[10, 10].mean()) / 100) for frame in frames] == [0, 1, 2]


def test_frames_of_other_sizes_are_cut_or_padded_to_the_size_of_the_first(tmp_path):
    with VideoFile(tmp_path / "v.mp4") as video:
        for height, width in ((33, 47), (16, 24), (64, 30)):
            video.write(solid(height, width, 200))
    frames = read_video(tmp_path / "v.mp4", 48, 34)
    shares = [float((frame > 100).mean()) * 34 * 48 for frame in frames]
    assert shares == pytest.approx([33 * 47, 16 * 24, 34 * 30], rel=0.05)


def test_a_video_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        VideoFile(tmp_path / "no" / "v.mp4").write(solid(2, 2, 0))


def test_a_file_that_ffmpeg_cannot_finish_is_an_error_and_the_others_are_complete(tmp_path):
    (tmp_path / "env-1.mp4").symlink_to("/dev/full")
    recorder = Recorder(tmp_path / "v.mp4", tmp_path, 2)
    recorder.add(lambda: [solid(34, 48, 100)] * 2)
    with pytest.raises(UsageError, match=r"env-1.mp4' is incomplete: ffmpeg ended with status \d+"):
        recorder.close()
    assert len(read_video(tmp_path / "env-0.mp4", 48, 34)) == len(read_video(tmp_path / "v.mp4", 96, 34)) == 1


def run_env(*arguments, cwd):
    (cwd / "my_envs.py").write_text(MY_ENVS)
    return run_command("run", *arguments, "--steps", "30", "--num-envs", "3", cwd=cwd)


@pytest.mark.slow
def test_a_run_writes_a_grid_and_a_video_per_env(tmp_path):
    (tmp_path / "each").mkdir()
    done = run_env("my_envs:Coloured-v0", "--video", "all.mp4", "--video-dir", "each", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    frames = read_video(tmp_path / "all.mp4", 2 * 47, 2 * 33)
    assert len(frames) >= 10
    assert sorted(path.name for path in (tmp_path / "each").iterdir()) == ["env-0.mp4", "env-1.mp4", "env-2.mp4"]
    assert len(read_video(tmp_path / "each" / "env-1.mp4", 48, 34)) == len(frames)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["my_envs:Blind-v0", "--video", "all.mp4"], "render_mode='rgb_array'"),
        (["my_envs:Coloured-v0", "--video", "no/all.mp4"], "does not exist"),
        (["my_envs:Coloured-v0", "--video", "all.mp4", "--batch-size", "1"], "leave out --batch-size"),
    ],
)
def test_a_run_says_why_there_are_no_frames(arguments, text, tmp_path):
    done = run_env(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_whose_ffmpeg_ends_says_why_a_frame_could_not_be_written(tmp_path):
    done = run_env("my_envs:Coloured-v0", "--video", "all.unknown", cwd=tmp_path)
    assert done.returncode == 2
    # The pipe breaks while a frame is written, or ffmpeg has ended when the file is closed.
    assert re.search(
        "cannot write the video 'all.unknown': .*Broken pipe|the video 'all.unknown' is incomplete: ", done.stderr
    )
    assert "choose a" in done.stderr

"""Record `stepmill top` attached to a pool of 64 envs in 16 workers, and write docs/pictures/top.svg.

A program with the pool, and `stepmill top` on a pseudo-terminal, are started as processes of their own. Then one worker is
stopped with SIGSTOP, and another is killed. The picture has three pictures that the terminal showed, one after the other.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console

from stepmill.observe.attach import AttachedPool, only_pool

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "top.svg"
WIDTH, HEIGHT = 112, 38
STOPPED, KILLED = 3, 9
LIMIT_S = 60.0
SECONDS_PER_PICTURE = 4
PROGRAM = """
import sys, time
import gymnasium, numpy as np, stepmill

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step_s):
        self.step_s, self.num_steps = step_s, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.step_s * self.np_random.uniform(0.5, 1.5))
        self.num_steps += 1
        return np.zeros(4, np.float32), 1.0, self.num_steps == 200, False, {}

envs = [lambda step_s=0.04 if i == 21 else 0.01: Walk(step_s) for i in range(64)]
with stepmill.Pool(envs, num_workers=16, batch_size=16, on_fault="truncate") as pool:
    pool.reset_async(seed=0)
    print("ready", flush=True)
    while True:
        batch = pool.recv()
        pool.send(np.zeros(16, int), batch.env_id)
"""
FORMAT = """<svg class="rich-terminal" width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>"""


class Terminal:
    """`stepmill top` on a pseudo-terminal."""

    def __init__(self, pid: int) -> None:
        self._fd, theirs = pty.openpty()
        size = {"COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        command = [sys.executable, "-m", "stepmill", "top", str(pid), "--interval", "1"]
        self._process = subprocess.Popen(command, env={**os.environ, **size}, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self._text = ""

    def wait_for_picture(self, is_wanted: Callable[[str], bool]) -> str:
        """Return the next picture that is wanted, as the terminal received it.

        Raises:
            SystemExit: it does not come.
        """
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            if select.select([self._fd], [], [], 0.1)[0]:
                self._text += os.read(self._fd, 1 << 16).decode(errors="ignore")
            *whole, self._text = self._text.split("\x1b[H")
            for picture in whole:
                if is_wanted(plain(picture)):
                    return picture
        raise SystemExit(f"the picture did not come within {LIMIT_S:g} s")

    def close(self) -> None:
        """End the command as a user does."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(self._fd, 1 << 16):
                pass
        self._process.wait()
        os.close(self._fd)


def plain(text: str) -> str:
    """Return a text without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def worker_line(text: str, worker: int) -> str:
    """Return the line of a worker, or an empty string."""
    return next((line for line in text.splitlines() if re.match(rf"\W*{worker} +\d+ ", line)), "")


def _start_program(folder: Path) -> subprocess.Popen[str]:
    """Start the program by a name without a path, which the picture shows."""
    (folder / "train.py").write_text(PROGRAM)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["python", "train.py"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def record(folder: Path) -> list[tuple[str, str]]:
    """Run the program and the command, and return three pictures, each with its title."""
    program = _start_program(folder)
    stopped = 0
    try:
        assert program.stdout is not None
        program.stdout.readline()
        with AttachedPool(only_pool(program.pid)) as pool:
            pids = [worker.pid for worker in pool.stats().workers]
        terminal = Terminal(program.pid)
        try:
            first = [terminal.wait_for_picture(lambda text: bool(worker_line(text, 15))) for _ in range(3)][-1]
            stopped = pids[STOPPED]
            os.kill(stopped, signal.SIGSTOP)
            second = terminal.wait_for_picture(lambda text: "stopped, env" in worker_line(text, STOPPED))
            os.kill(pids[KILLED], signal.SIGKILL)
            third = terminal.wait_for_picture(lambda text: bool(re.search(r"\b1 +1\b", worker_line(text, KILLED)[40:])))
        finally:
            terminal.close()
    finally:
        if stopped:
            os.kill(stopped, signal.SIGCONT)
        program.kill()
        program.wait()
    command = f"stepmill top {program.pid}"
    return [
        (command, first),
        (f"{command}    (worker {STOPPED} was stopped with SIGSTOP)", second),
        (f"{command}    (worker {KILLED} was killed)", third),
    ]


def draw(pictures: list[tuple[str, str]]) -> str:
    """Return one SVG that shows the pictures one after the other; readers who want no motion see the last."""
    parts = [_draw_one(f"top{number}", title, text) for number, (title, text) in enumerate(pictures)]
    sizes = [re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', part) for part in parts]
    width, height = (max(float(size[axis]) for size in sizes if size) for axis in (1, 2))
    share, seconds = 100 / len(parts), SECONDS_PER_PICTURE * len(parts)
    rules = [
        f"@keyframes top-turn {{ 0%, {share:.2f}% {{ opacity: 1 }} {share + 0.01:.2f}%, 100% {{ opacity: 0 }} }}",
        f".top-picture {{ opacity: 0; animation: top-turn {seconds}s step-end infinite }}",
        *(f".top-picture-{i} {{ animation-delay: {i * SECONDS_PER_PICTURE}s }}" for i in range(len(parts))),
        f"@media (prefers-reduced-motion) {{ .top-picture {{ animation: none }} .top-picture-{len(parts) - 1} {{ opacity: 1 }} }}",
    ]
    style = "\n".join(rules)
    groups = "\n".join(
        f'<g class="top-picture top-picture-{number}">\n{part}\n</g>' for number, part in enumerate(parts)
    )
    return f'<svg class="terminal" viewBox="0 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg">\n<style>\n{style}\n</style>\n{groups}\n</svg>\n'


def _draw_one(name: str, title: str, text: str) -> str:
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), color_system="truecolor")
    console.print(*AnsiDecoder().decode(text.replace("\r\n", "\n").rstrip()), sep="\n", no_wrap=True)
    return console.export_svg(title=title, code_format=FORMAT, unique_id=name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        PICTURE.write_text(draw(record(Path(temporary))), encoding="utf-8")
    print(f"wrote {PICTURE}")

"""Record a training whose workers are killed beside one that is not, and write docs/pictures/kill_worker.svg.

The picture moves: `stepmill top` at the left, `kill -9` at the right, and the learning curves of both trainings below. The learner is
the one of examples/kill_me.py. Readers who want no motion see the end.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
from docs_drawings import STYLE
from record_top import FORMAT
from rich.console import Console

import stepmill
from stepmill.observe.monitor import Watch, render

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import kill_me  # type: ignore[import-not-found]  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "kill_worker.svg"
NUM_UPDATES, LOOK_EVERY, KILLS = 60, 5, (12, 27, 42)
COLUMNS, ROWS = 84, 16
RUN_S, HOLD_S = 12.0, 5.0
WIDTH, TOP_WIDTH, TOP_HEIGHT, CURVES_HEIGHT = 1000, 660, 250, 200


@dataclass
class Training:
    """What a training has shown: pictures of `top` and killed workers by the number of the update, returns, and a digest of the weights."""

    pictures: list[tuple[int, str]]
    killed: list[tuple[int, int]]
    curve: list[float]
    digest: str


def train(kills: Sequence[int]) -> Training:
    """Train, and kill a worker in the updates of `kills`, while its envs step."""
    options = stepmill.PoolOptions(backend="process", num_workers=2, on_fault="replay", seeding="per_episode")
    makers = [partial(gymnasium.make, "CartPole-v1")] * kill_me.NUM_ENVS
    shown = Training([], [], [], "")
    with stepmill.Pool(makers, options=options) as pool:
        rollout, learner = stepmill.Rollout(pool, kill_me.NUM_STEPS), kill_me.Learner(seed=1)
        watch = Watch("stepmill top", pool.stats)
        rollout.reset(seed=1)
        num_steps = 0

        def act(obs: object, info: object, update: int) -> object:
            nonlocal num_steps
            num_steps += 1
            if update in kills and num_steps == kill_me.NUM_STEPS // 2:
                pid = pool.stats().workers[len(shown.killed) % 2].pid
                os.kill(pid, signal.SIGKILL)
                shown.killed.append((update, pid))
            return learner.act(obs, info)

        for update in range(NUM_UPDATES):
            num_steps = 0
            batch = rollout.collect(partial(act, update=update))
            learner.learn(batch)
            shown.curve.append(float(np.mean([each["r"] for each in batch.episodes] or [kill_me.NUM_STEPS])))
            if update % LOOK_EVERY == LOOK_EVERY - 1 or update in kills:
                console = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), color_system="truecolor")
                console.print(render(watch.look(), console, end=""))
                name = f"top{len(shown.pictures)}"
                shown.pictures.append((update, console.export_svg(title="", code_format=FORMAT, unique_id=name)))
        shown.digest = hashlib.sha256(b"".join(each.tobytes() for each in learner.weights)).hexdigest()[:12]
    return shown


def draw(plain: Training, killed: Training) -> str:
    """Return the picture as SVG."""
    rules: list[str] = []
    shapes = [
        *_draw_top(killed.pictures, rules),
        *_draw_kills(killed.killed, rules),
        *_draw_curves(plain, killed, rules),
    ]
    height = TOP_HEIGHT + CURVES_HEIGHT + 40
    still = "@media (prefers-reduced-motion) { .moving { animation: none !important } .past { opacity: 0 !important } }"
    style = "\n".join(
        [
            STYLE.replace("svg.stepmill:not(.recorded) text", "svg.stepmill text.label"),
            "svg.stepmill text.mono { font-family: Menlo, Consolas, monospace !important }",
            *rules,
            still,
        ]
    )
    return (
        f'<svg class="stepmill recorded" role="img" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">\n'
        "<title>Workers of a training are killed, and its learning curve stays that of an undisturbed training</title>\n"
        f'<style>\n{style}\n</style>\n<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--paper)"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _share(update: float) -> float:
    """Return when an update is shown, in percent of the whole motion."""
    return 100 * RUN_S * update / NUM_UPDATES / (RUN_S + HOLD_S)


def _appear(name: str, since: float, until: float | None, rules: list[str]) -> str:
    """Add the rule of a shape that is seen between two updates, or from one on. Return its class."""
    gone = "" if until is None else f" {_share(until):.2f}% {{ opacity: 0 }}"
    rules.append(f"@keyframes {name} {{ 0% {{ opacity: 0 }} {_share(since):.2f}% {{ opacity: 1 }}{gone} }}")
    rules.append(f".{name} {{ animation: {name} {RUN_S + HOLD_S:g}s step-end infinite }}")
    return f"moving {name}" + ("" if until is None else " past")


def _draw_top(pictures: Sequence[tuple[int, str]], rules: list[str]) -> list[str]:
    shapes = []
    for place, (update, svg) in enumerate(pictures):
        until = pictures[place + 1][0] + 1 if place + 1 < len(pictures) else None
        name = _appear(f"top-{place}", update + 1 if place else 0, until, rules)
        size = f'x="10" y="10" width="{TOP_WIDTH}" height="{TOP_HEIGHT}" preserveAspectRatio="xMinYMin"'
        shapes.append(f'<g class="{name}">' + re.sub(r'width="[\d.]+" height="[\d.]+"', size, svg, count=1) + "</g>")
    return shapes


def _draw_kills(killed: Sequence[tuple[int, int]], rules: list[str]) -> list[str]:
    left = TOP_WIDTH + 30
    box = f'<rect x="{left}" y="14" width="{WIDTH - left - 14}" height="{TOP_HEIGHT - 20}" rx="8" fill="var(--soft)"/>'
    lines = [
        (f"$ kill -9 {pid}", f"# worker {place % 2}, update {update}", update)
        for place, (update, pid) in enumerate(killed)
    ]
    shapes = [box]
    for place, (command, remark, update) in enumerate(lines):
        name, top = _appear(f"kill-{place}", update, None, rules), 56 + 68 * place
        shapes.append(
            f'<g class="{name}"><text class="label mono" x="{left + 20}" y="{top}" font-size="20">{command}</text>'
            f'<text class="label mono" x="{left + 20}" y="{top + 26}" font-size="15" opacity="0.7">{remark}</text></g>'
        )
    return shapes


def _draw_curves(plain: Training, killed: Training, rules: list[str]) -> list[str]:
    left, right, top, bottom = 60, WIDTH - 30, TOP_HEIGHT + 30, TOP_HEIGHT + CURVES_HEIGHT
    most = max(*plain.curve, *killed.curve)

    def place(update: float, value: float) -> str:
        return f"{left + (right - left) * update / NUM_UPDATES:.1f},{bottom - (bottom - top) * value / most:.1f}"

    def line(curve: Sequence[float], colour: str, width: int) -> str:
        points = " ".join(place(update + 1, value) for update, value in enumerate(curve))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    rules.append(
        f"@keyframes reveal {{ 0% {{ transform: none }} {_share(NUM_UPDATES):.2f}%, 100% {{ transform: translateX({right - left + 30}px) }} }}"
    )
    rules.append(f".reveal {{ animation: reveal {RUN_S + HOLD_S:g}s linear infinite }}")
    marks = [
        f'<text class="label" x="{place(update, 0).partition(",")[0]}" y="{bottom + 20}" font-size="14" text-anchor="middle">killed</text>'
        for update, _ in killed.killed
    ]
    differing = sum(a != b for a, b in zip(plain.curve, killed.curve, strict=True))
    end = _appear("end", NUM_UPDATES, None, rules)
    return [
        f'<svg x="0" y="{top - 20}" width="{right + 10}" height="{CURVES_HEIGHT + 30}" viewBox="0 {top - 20} {right + 10} {CURVES_HEIGHT + 30}">',
        line(plain.curve, "var(--accent)", 9),
        line(killed.curve, "var(--accent-line)", 2),
        *marks,
        # The cover moves to the right. Without motion it is not seen.
        f'<rect class="moving reveal past" x="{left}" y="{top - 20}" width="{right - left + 30}" height="{CURVES_HEIGHT + 30}" fill="var(--paper)"/>',
        "</svg>",
        f'<text class="label" x="{left}" y="{top - 6}" font-size="15">mean return: never killed (wide), workers killed (thin)</text>',
        (
            f'<text class="label mono {end}" x="{right}" y="{bottom - 14}" font-size="15" text-anchor="end">'
            f"{differing} of {len(plain.curve)} returns differ; weights {plain.digest} and {killed.digest}</text>"
        ),
    ]


if __name__ == "__main__":
    undisturbed, disturbed = train(()), train(KILLS)
    assert undisturbed.digest == disturbed.digest
    assert undisturbed.curve == disturbed.curve
    PICTURE.write_text(draw(undisturbed, disturbed), encoding="utf-8")
    print(f"wrote {PICTURE}: {PICTURE.stat().st_size / 1e3:.0f} kB")

"""The training programs of `benchmarks.programs`, and the table of their results in docs/programs.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import program_texts
from benchmarks.paths import FRONTENDS, ROOT
from benchmarks.paths import PROGRAMS as PROGRAMS_VENV
from benchmarks.program_texts import Text, Zoo
from benchmarks.readme import replace_block

OURS = "stepmill"
VALUES = ROOT / "docs" / "programs.json"
PAGE = ROOT / "docs" / "programs.md"
PARTS = ("start_s", "rollout_s", "learner_s")
_SAME = 0.995  # a ratio that is shown as 1.00


@dataclass(frozen=True)
class Run:
    """One run: seconds of the whole and of its parts, what was learned, and the share of the machine that others used."""

    program: str
    engine: str
    seed: int
    whole_s: float
    start_s: float
    rollout_s: float
    learner_s: float
    learned: str
    others: float


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        title: its name in the table, with a place for the number of steps.
        engines: the classes that its library offers.
        steps: of all envs.
        few_steps: enough for one update.
        source: a program of another project; without it, one of `benchmarks.program_child`.
        reason: why stepmill is not ahead, if it is not.
    """

    title: str
    engines: tuple[str, ...]
    steps: int
    few_steps: int
    source: Text | Zoo | None = None
    reason: str = ""

    @property
    def venv(self) -> str:
        return PROGRAMS_VENV if self.source else FRONTENDS

    def command(self, name: str, engine: str, seed: int, steps: int, folder: Path) -> tuple[list[str], list[str]]:
        """Return the arguments of Python that run it in a folder, and further folders to import from."""
        if self.source:
            return self.source.prepare(engine, seed, steps, folder), self.source.import_path()
        return ["-m", "benchmarks.program_child", name, engine, str(seed), str(steps)], []


_SB3, _GYM = ("DummyVecEnv", "SubprocVecEnv"), ("SyncVectorEnv", "AsyncVectorEnv")
_IN_LINE = "`backend=\"auto\"` steps this env in the program's own process, as the library's fastest class does"
_LEARNER = "The learner takes most of the time"
PROGRAMS = {
    "sb3-ppo-cartpole": Program("SB3's PPO, CartPole, 8 envs", _SB3, 40_000, 16_384, reason=_IN_LINE),
    "sb3-ppo-halfcheetah": Program("SB3's PPO, HalfCheetah, 8 envs", _SB3, 32_000, 16_384, reason=_LEARNER),
    "sb3-ppo-pong": Program("SB3's PPO, Pong, 8 envs", _SB3, 4_096, 1_024, reason=_LEARNER),
    "sb3-ppo-2ms": Program("SB3's PPO, steps of 2 ms, 8 envs", _SB3, 8_000, 2_048),
    "sb3-sac-n1": Program("SB3's SAC, Pendulum, 1 env", ("DummyVecEnv",), 1_500, 110, reason=_IN_LINE),
    "sb3-sac-n4": Program("SB3's SAC, Pendulum, 4 envs", _SB3, 4_000, 120, reason=_IN_LINE),
    "cleanrl-ppo": Program(
        "CleanRL's `ppo.py`, CartPole, 4 envs", _GYM, 32_768, 1_024, program_texts.CLEANRL_PPO, _IN_LINE
    ),
    "cleanrl-ppo-atari": Program(
        "CleanRL's `ppo_atari.py`, Breakout, 8 envs", _GYM, 1_536, 512, program_texts.CLEANRL_PPO_ATARI, _LEARNER
    ),
    "cleanrl-ppo-continuous": Program(
        "CleanRL's `ppo_continuous_action.py`, HalfCheetah, 1 env",
        _GYM,
        12_288,
        1_024,
        program_texts.CLEANRL_PPO_CONTINUOUS,
        _IN_LINE,
    ),
    "cleanrl-sac": Program(
        "CleanRL's `sac_continuous_action.py`, Hopper, 1 env", _GYM, 1_200, 210, program_texts.CLEANRL_SAC, _IN_LINE
    ),
    "zoo-ppo-cartpole": Program(
        "RL Zoo's PPO, CartPole, 8 envs", ("dummy", "subproc"), 32_768, 512, Zoo("ppo", "CartPole-v1"), _IN_LINE
    ),
    "skrl-ppo-pendulum": Program(
        "skrl's PPO, Pendulum, 4 envs", ("sync", "async"), 6_144, 1_024, program_texts.SKRL_PPO, _IN_LINE
    ),
    "tianshou-ppo-cartpole": Program(
        "Tianshou's PPO, CartPole, 8 envs",
        ("DummyVectorEnv", "SubprocVectorEnv", "ShmemVectorEnv"),
        40_960,
        2_048,
        reason=_IN_LINE,
    ),
    "torchrl-collector": Program(
        "TorchRL's collector, Pendulum, 8 envs",
        ("SerialEnv", "ParallelEnv"),
        16_000,
        1_600,
        reason='TorchRL\'s envs need torch and torchrl in each worker, which start later; `backend="serial"` imports nothing twice',
    ),
}


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of several runs. The runs of a program are those of the last file that has it."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for name in dict.fromkeys(run["program"] for run in part["runs"]):
            runs[name] = [run for run in part["runs"] if run["program"] == name]
    return {"machine": parts[-1]["machine"], "runs": [run for name in PROGRAMS for run in runs.get(name, ())]}


def write(results: dict[str, Any]) -> None:
    """Write the results into docs/programs.json, with seconds of three decimals, and the table into docs/programs.md."""
    runs = [{name: _rounded(value) for name, value in run.items()} for run in results["runs"]]
    results = {"machine": results["machine"], "runs": runs}
    VALUES.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(replace_block(PAGE.read_text(encoding="utf-8"), "programs", to_block(results)), encoding="utf-8")


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def is_stale() -> bool:
    """Return whether the page has another table than docs/programs.json gives."""
    page = PAGE.read_text(encoding="utf-8")
    return page != replace_block(page, "programs", to_block(json.loads(VALUES.read_text(encoding="utf-8"))))


def to_block(results: dict[str, Any]) -> str:
    """Return the table, with medians over the seeds, and a line about the machine."""
    runs = [Run(**run) for run in results["runs"]]
    names = [name for name in PROGRAMS if any(run.program == name for run in runs)]
    seeds = sorted({run.seed for run in runs})
    facts = results["machine"]
    lines = [
        "| program | the library's classes, s | stepmill, s | of this: start, rollouts, learner | relative to the fastest | same weights | why not faster |",
        "|---|---|---:|---|---:|---|---|",
        *(_row(name, [run for run in runs if run.program == name]) for name in names),
    ]
    which = f"Medians of seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"One seed, {seeds[0]}"
    others = f"{max(run.others for run in runs):.1%}".replace("%", " %")
    about = f"{which}, on {facts['cores']} cores ({facts['cpu']}), commit {facts['commit'][:8]}."
    lines += ["", f"{about} Other processes used at most {others} of the machine in a run."]
    return "\n".join(lines) + "\n"


def _row(name: str, runs: Sequence[Run]) -> str:
    program = PROGRAMS[name]
    whole = {engine: _median(runs, engine, "whole_s") for engine in (*program.engines, OURS)}
    ratio = min(whole[engine] for engine in program.engines) / whole[OURS]
    learned = [{run.learned for run in runs if run.seed == seed} for seed in {run.seed for run in runs}]
    cells = [
        f"{program.title}, {program.steps:,} steps",
        ", ".join(f"{engine} {whole[engine]:.1f}" for engine in program.engines),
        f"{whole[OURS]:.1f}",
        ", ".join(f"{_median(runs, OURS, part):.1f}" for part in PARTS),
        f"{ratio:.2f}×",
        f"{sum(len(found) == 1 for found in learned)} of {len(learned)} seeds",
        "" if ratio > 1 / _SAME else program.reason,
    ]
    return f"| {' | '.join(cells)} |"


def _median(runs: Sequence[Run], engine: str, part: str) -> float:
    return statistics.median(getattr(run, part) for run in runs if run.engine == engine)

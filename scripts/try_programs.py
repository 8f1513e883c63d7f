"""Runs training programs of other projects with their own vector env and with stepmill's: `try_programs.py [PROGRAM ...]`.

The programs come from checkouts in the folder $STEPMILL_ORIGINALS: `cleanrl` and `rl-baselines3-zoo`. Each program runs with several
seeds, with both classes in turn, on a quiet machine if it gets quiet within ten minutes. Prints a row of the table in docs/programs.md per
program: whether all losses and episodes were equal, the median ratio of the steps per second that the program itself reports, and that of the
whole program, from its start to its end.
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from side_env import ROOT, make_side_env

sys.path.insert(0, str(ROOT))

from benchmarks.programs import run_timed, wait_until_quiet

SPEED = re.compile(r"(?:SPS:|\bfps +\|) *(\d+)")
IMPORTED = ("import gymnasium as gym\n", "import gymnasium as gym\nimport stepmill\n")
OURS = ("gym.vector.SyncVectorEnv(", "stepmill.VectorEnv(")
ZOO_LINE = "ExperimentManager.default_vec_env_cls = SB3VecEnv"
ZOO_MODULE = (
    f"from rl_zoo3.exp_manager import ExperimentManager\nfrom stepmill.frontends.sb3 import SB3VecEnv\n{ZOO_LINE}\n"
)
READ_SCALARS = """
import csv, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0}).Reload()
out = csv.writer(sys.stdout)
for tag in sorted(events.Tags()["scalars"]):
    out.writerows([tag, each.step, each.value] for each in events.Scalars(tag) if tag != "charts/SPS")
"""


@dataclass(frozen=True)
class Program:
    """A program of CleanRL: what Gymnasium 1 needs changed in it, for both classes, and its arguments."""

    port: tuple[tuple[str, str], ...]
    arguments: str


CLEANRL = {
    "ppo": Program((), "--total-timesteps 32768"),
    "ppo_continuous_action": Program(
        (("np.clip(obs, -10, 10))", "np.clip(obs, -10, 10), env.observation_space)"),),
        "--total-timesteps 12288 --num-steps 1024 --num-minibatches 16",
    ),
    "sac_continuous_action": Program((), "--total-timesteps 1200 --learning-starts 200"),
    "ppo_atari": Program(
        (
            ("import gymnasium as gym\n", "import ale_py\nimport gymnasium as gym\n"),
            ("GrayScaleObservation(", "GrayscaleObservation("),
            ("FrameStack(", "FrameStackObservation("),
        ),
        "--total-timesteps 1536 --num-steps 64",
    ),
}
ZOO = "rl_zoo3.train ppo CartPole-v1"


@dataclass(frozen=True)
class Run:
    """One run of a program.

    Attributes:
        speed: the steps per second that it reported last.
        whole_s: from its start to its end.
        others: the share of the machine that other processes used meanwhile.
        data: what it computed.
    """

    speed: int
    whole_s: float
    others: float
    data: tuple[tuple[str, ...], ...]


def main() -> int:
    """Run the programs. The exit status is 1 if data differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join([*CLEANRL, ZOO])}; none is all")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    checkouts = Path(os.environ["STEPMILL_ORIGINALS"])
    python = make_environment()
    are_equal = True
    for name in given.programs or [*CLEANRL, ZOO]:
        runs = []
        for seed in range(1, given.seeds + 1):
            order = (False, True) if seed % 2 else (True, False)
            found = {is_ours: run_program(python, checkouts, name, seed, is_ours=is_ours) for is_ours in order}
            runs.append((found[False], found[True]))
        are_equal &= print_row(name, runs)
    return 0 if are_equal else 1


def make_environment() -> Path:
    """Make .venvs/programs with torch and what the programs import, and return its Python."""
    python = make_side_env(ROOT / ".venvs" / "programs", editable=True, has_torch=True)
    wanted = ["tyro", "tensorboard", "tenacity", "rl-zoo3==2.9.2"]
    subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], stdout=sys.stderr, check=True)
    return python


def run_program(python: Path, checkouts: Path, name: str, seed: int, *, is_ours: bool) -> Run:
    """Run a program once, in a folder of its own, with one thread of torch."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name == ZOO:
            return run_zoo(python, folder, seed, is_ours=is_ours)
        program, checkout = CLEANRL[name], checkouts / "cleanrl"
        text = (checkout / "cleanrl" / f"{name}.py").read_text(encoding="utf-8")
        for old, new in (*program.port, *((IMPORTED, OURS) if is_ours else ())):
            if text.count(old) != 1:
                raise SystemExit(f"{name}.py has {text.count(old)} times {old!r}; once is expected")
            text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        measured = run_python(python, folder, [f"{name}.py", *program.arguments.split(), f"--seed={seed}"], checkout)
        events = str(next((folder / "runs").iterdir()))
        read = subprocess.run([python, "-c", READ_SCALARS, events], check=True, capture_output=True, text=True)
        return Run(*measured, tuple(map(tuple, csv.reader(read.stdout.splitlines()))))


def run_zoo(python: Path, folder: Path, seed: int, *, is_ours: bool) -> Run:
    """Run RL Zoo's training. Its data are the returns and lengths of the episodes of each env."""
    arguments = f"-m rl_zoo3.train --algo ppo --env CartPole-v1 -n 32768 --eval-freq -1 --seed {seed} -f logs".split()
    if is_ours:
        (folder / "stepmill_in_zoo.py").write_text(ZOO_MODULE, encoding="utf-8")
        arguments += ["--gym-packages", "stepmill_in_zoo"]
    measured = run_python(python, folder, arguments, folder)
    rows = [(file.name, *row[:2]) for file in sorted(folder.rglob("*.monitor.csv")) for row in read_rows(file)]
    return Run(*measured, tuple(rows))


def read_rows(file: Path) -> list[list[str]]:
    """Return the episodes in a file of SB3's Monitor, whose first two lines are its head."""
    return list(csv.reader(file.read_text(encoding="utf-8").splitlines()))[2:]


def run_python(python: Path, folder: Path, arguments: Sequence[str], path: Path) -> tuple[int, float, float]:
    """Run Python, and return the last steps per second that the program printed, the whole seconds, and what other processes used."""
    wait_until_quiet()
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    stdout, whole_s, others = run_timed([str(python), *arguments], 600, env, folder)
    return int(SPEED.findall(stdout)[-1]), whole_s, others


def print_row(name: str, runs: Sequence[tuple[Run, Run]]) -> bool:
    """Print a row of the table, and return whether the data were equal with every seed."""
    equal = sum(theirs.data == ours.data for theirs, ours in runs)
    numbers = sum(len(ours.data) for _, ours in runs)
    ratio = statistics.median(ours.speed / theirs.speed for theirs, ours in runs)
    whole = statistics.median(theirs.whole_s / ours.whole_s for theirs, ours in runs)
    loudest = max(run.others for pair in runs for run in pair)
    pairs = "; ".join(
        f"{theirs.speed}/{ours.speed}, {theirs.whole_s:.1f}/{ours.whole_s:.1f} s" for theirs, ours in runs
    )
    print(
        f"| `{name}` | {equal} of {len(runs)} seeds, {numbers} values | {ratio:.2f} | {whole:.2f} | {pairs}; others {loudest:.0%} |",
        flush=True,
    )
    return equal == len(runs) and numbers > 0


if __name__ == "__main__":
    sys.exit(main())

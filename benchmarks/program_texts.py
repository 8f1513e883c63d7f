"""Training programs of other projects, with a clock in them: CleanRL's and skrl's, which are files, and RL Zoo's, which is a command.

The files come from checkouts in the folder $STEPMILL_ORIGINALS: `cleanrl` (vwxyzjn/cleanrl at fe8d8a03) and `skrl` (Toni-SM/skrl at
c29ced63). A program is copied into an empty folder with some of its lines replaced: those that Gymnasium 1 needs changed and those that the
clock needs, the same for all classes, and the line that makes the envs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Edits = Sequence[tuple[str, str]]

_IMPORTS = "import gymnasium as gym\n"
_CLOCK = "from benchmarks.program_clock import Clock\n\nclock = Clock()\n"
_STEPMILL = (_IMPORTS, f"{_IMPORTS}import stepmill\n")


@dataclass(frozen=True)
class Text:
    """A program in a file.

    Attributes:
        path: in $STEPMILL_ORIGINALS.
        arguments: with a place for the number of steps; the seed follows.
        edits: what is replaced for all classes.
        engines: what is replaced for each class.
        end: lines after the last one.
    """

    path: str
    arguments: str
    edits: Edits
    engines: Mapping[str, Edits]
    end: str = ""

    def prepare(self, engine: str, seed: int, steps: int, folder: Path) -> list[str]:
        """Write the program into a folder. Return the arguments that Python needs to run it there."""
        checkouts = os.environ.get("STEPMILL_ORIGINALS")
        source = Path(checkouts or "", self.path)
        if not checkouts or not source.exists():
            raise SystemExit(
                f"no {self.path} in $STEPMILL_ORIGINALS; benchmarks/program_texts.py says which checkouts are needed"
            )
        text = source.read_text(encoding="utf-8")
        for old, new in (*self.edits, *self.engines[engine]):
            if text.count(old) != 1:
                raise SystemExit(f"{self.path} has {text.count(old)} times {old!r}; once is expected")
            text = text.replace(old, new)
        (folder / source.name).write_text(f"{text}{self.end}", encoding="utf-8")
        return [source.name, *self.arguments.format(steps=steps).split(), f"--seed={seed}"]

    def import_path(self) -> list[str]:
        """Return the folder of the checkout, whose modules the program imports."""
        return [str(Path(os.environ["STEPMILL_ORIGINALS"], Path(self.path).parts[0]))]


def _cleanrl(
    name: str, arguments: str, port: Edits = (), rollout: tuple[str, str] | None = None, learned: str = "agent"
) -> Text:
    begin, end = rollout or (
        "        for step in range(0, args.num_steps):\n",
        "        # bootstrap value if not done\n",
    )
    timed = [(begin, f"        clock.begin_rollout()\n{begin}"), (end, f"        clock.end_rollout()\n{end}")]
    return Text(
        f"cleanrl/cleanrl/{name}.py",
        f"--total-timesteps {{steps}} {arguments}",
        [*port, (_IMPORTS, f"{_CLOCK}{_IMPORTS}"), *timed],
        {
            "SyncVectorEnv": (),
            "AsyncVectorEnv": [("gym.vector.SyncVectorEnv(", "gym.vector.AsyncVectorEnv(")],
            "stepmill": [_STEPMILL, ("gym.vector.SyncVectorEnv(", "stepmill.VectorEnv(")],
        },
        f"    clock.end({learned})\n",
    )


CLEANRL_PPO = _cleanrl("ppo", "")
CLEANRL_PPO_CONTINUOUS = _cleanrl(
    "ppo_continuous_action",
    "--num-steps 1024 --num-minibatches 16",
    [("np.clip(obs, -10, 10))", "np.clip(obs, -10, 10), env.observation_space)")],
)
CLEANRL_PPO_ATARI = _cleanrl(
    "ppo_atari",
    "--num-steps 64",
    [
        (_IMPORTS, f"import ale_py\n{_IMPORTS}"),
        ("GrayScaleObservation(", "GrayscaleObservation("),
        ("FrameStack(", "FrameStackObservation("),
    ],
)
CLEANRL_SAC = _cleanrl(
    "sac_continuous_action",
    "--learning-starts 200",
    rollout=("        # ALGO LOGIC: put action logic here\n", "        # ALGO LOGIC: training.\n"),
    learned="actor",
)

_MAKE_VEC = 'gym.make_vec(env_id, num_envs=args.num_envs, render_mode=render_mode, vectorization_mode="sync")'
_TRAIN = "trainer.train() if not args.eval else trainer.eval()\n"
SKRL_PPO = Text(
    "skrl/examples/gymnasium/torch_gymnasium_pendulum_ppo.py",
    "--headless --num_envs 4 --timesteps {steps}",
    [
        (_IMPORTS, f"{_CLOCK}{_IMPORTS}"),
        ("args, _ = parser", 'parser.add_argument("--timesteps", type=int)\nargs, _ = parser'),
        ('{"timesteps": 100000,', '{"timesteps": args.timesteps,'),
        (_TRAIN, f"agent.update = clock.between_rollouts(agent.update)\nclock.begin_rollout()\n{_TRAIN}"),
    ],
    {
        "sync": (),
        "async": [(_MAKE_VEC, _MAKE_VEC.replace("sync", "async"))],
        "stepmill": [
            _STEPMILL,
            (_MAKE_VEC, "stepmill.make_vec(env_id, num_envs=args.num_envs, render_mode=render_mode)"),
        ],
    },
    "clock.end(models['policy'], models['value'])\n",
)

_ZOO = """
from benchmarks.program_clock import make_sb3_callback
from rl_zoo3.exp_manager import ExperimentManager

Callback = make_sb3_callback()
"""
_ZOO_STEPMILL = """
from stepmill.frontends.sb3 import SB3VecEnv

ExperimentManager.default_vec_env_cls = SB3VecEnv
"""


@dataclass(frozen=True)
class Zoo:
    """RL Zoo's command. A module that it imports has the clock, and chooses stepmill's class."""

    algorithm: str
    env_id: str

    def prepare(self, engine: str, seed: int, steps: int, folder: Path) -> list[str]:
        """Write the module into a folder. Return the arguments that Python needs to run the command there."""
        (folder / "in_zoo.py").write_text(_ZOO + (_ZOO_STEPMILL if engine == "stepmill" else ""), encoding="utf-8")
        of_class = ["--vec-env", engine] if engine != "stepmill" else []
        command = f"-m rl_zoo3.train --algo {self.algorithm} --env {self.env_id} -n {steps} --eval-freq -1 --seed {seed} -f logs"
        return [*command.split(), *of_class, "--gym-packages", "in_zoo", "-params", "callback:'in_zoo.Callback'"]

    def import_path(self) -> list[str]:
        """Return nothing: RL Zoo is installed."""
        return []

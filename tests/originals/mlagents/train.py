"""ML-Agents' own PPO: `python -m tests.originals.mlagents.train WHOSE STEPS`, in an empty folder.

WHOSE is "ours" or "original". `mlagents-learn`'s own function trains two players over gRPC; only its SubprocessEnvManager is
replaced. Prints, as its last line, JSON: what was trained, agents' steps, mean reward at the end, seconds, the learning curve, and
the names of the timers below "workers" in timers.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.frontends.mlagents.protocol import free_ports, make_game

NUM_ENVS = 2
LEARNED = 8.0  # a random policy gets 5, the best 10
GAME = Path(__file__).with_name("game.py")


def make_options(folder: Path, num_steps: int) -> Any:
    """Return ML-Agents' RunOptions for PPO on the game."""
    from mlagents.plugins.trainer_type import register_trainer_plugins
    from mlagents.trainers.settings import RunOptions

    register_trainer_plugins()

    program = make_game(folder, GAME)
    return RunOptions.from_dict(
        {
            "behaviors": {
                "choose": {
                    "trainer_type": "ppo",
                    "hyperparameters": {"batch_size": 64, "buffer_size": 512, "learning_rate": 3e-3},
                    "network_settings": {"hidden_units": 32, "num_layers": 1},
                    "max_steps": num_steps,
                    "time_horizon": 32,
                    "summary_freq": 1000,
                }
            },
            "env_settings": {
                "env_path": str(program.with_suffix("")),
                "num_envs": NUM_ENVS,
                "base_port": free_ports(NUM_ENVS),
                "seed": 1,
            },
            "engine_settings": {"no_graphics": True},
            "checkpoint_settings": {"run_id": "run", "results_dir": str(folder / "results"), "force": True},
        }
    )


def main(whose: str, num_steps: int) -> None:
    """Train, and print the result."""
    from mlagents.trainers import learn
    from mlagents.trainers.stats import StatsReporter, StatsWriter
    from mlagents.trainers.torch_entities.model_serialization import ModelSerializer

    means: list[float] = []
    curve: list[tuple[int, float]] = []

    class Rewards(StatsWriter):  # type: ignore[misc, unused-ignore]
        def write_stats(self, category: str, values: Any, step: int) -> None:
            if "Environment/Cumulative Reward" in values:
                means.append(values["Environment/Cumulative Reward"].mean)
                curve.append((step, means[-1]))

    # The packages that export to ONNX do not exist for this NumPy and protobuf. Checkpoints of PyTorch are still written.
    ModelSerializer.export_policy_model = lambda self, path: Path(f"{path}.onnx").touch()
    if whose == "ours":
        from stepmill.frontends.mlagents import SubprocessEnvManager

        learn.SubprocessEnvManager = SubprocessEnvManager
    StatsReporter.add_writer(Rewards())
    folder = Path.cwd()
    began = time.perf_counter()
    learn.run_training(1, make_options(folder, num_steps), 1)
    seconds = time.perf_counter() - began
    timers = json.loads(next(folder.glob("results/run/run_logs/timers.json")).read_text(encoding="utf-8"))
    workers = find(timers, "workers")
    assert workers is not None, "timers.json has no timers of workers"
    assert means[-1] > LEARNED, f"the mean rewards are {means}"
    result = {
        "what": f"PPO on {NUM_ENVS} players over gRPC, by mlagents-learn",
        "steps": num_steps,
        "reward": f"{means[-1]:.1f} (first summary {means[0]:.1f})",
        "seconds": seconds,
        "curve": curve,
        "worker_timers": sorted(workers["children"]["worker_root"].get("children", {})),
    }
    print(json.dumps(result))


def find(node: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the first node of that name below a node of a timer tree."""
    children: dict[str, Any] = node.get("children", {})
    if name in children:
        found: dict[str, Any] = children[name]
        return found
    return next((each for child in children.values() if (each := find(child, name)) is not None), None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

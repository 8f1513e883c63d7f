"""DI-engine's own CartPole DQN: `python -m tests.originals.di_engine.train WHOSE MANAGER ITERATIONS`, in an empty folder.

WHOSE is "ours" or "original"; MANAGER a name of DI-engine's registry; ITERATIONS how long to train. Of dizoo's config
only the manager's name is changed, and how often it evaluates. Prints, as its last line, JSON: class of the manager, what was trained, env steps, the mean
return of the last evaluation, seconds, and the learning curve: env steps and the mean return of each evaluation.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from typing import Any

LEARNED = 50.0  # a random policy's mean return is about 20
MANY = 1000  # fewer iterations show that it runs, and not that it learns


def main(whose: str, manager: str, num_iterations: int) -> None:
    """Train, and print what came of it."""
    from ding.entry import serial_pipeline
    from ding.envs import get_env_manager_cls
    from ding.worker import InteractionSerialEvaluator, SampleSerialCollector
    from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

    main_cfg: Any = copy.deepcopy(main_config)
    create_cfg: Any = copy.deepcopy(create_config)
    create_cfg.env_manager.type = manager
    if num_iterations >= MANY:
        main_cfg.policy.eval.evaluator.eval_freq = 250  # instead of 40: most of the time would go into evaluations
    if whose == "ours":
        importlib.import_module("stepmill.frontends.di_engine")
    cls = get_env_manager_cls(create_cfg.env_manager)
    returns: list[float] = []
    curve: list[tuple[int, float]] = []
    num_steps = [0]
    evaluate, collect = InteractionSerialEvaluator.eval, SampleSerialCollector.collect

    def noting_eval(self: Any, *args: Any, **keywords: Any) -> Any:
        found = evaluate(self, *args, **keywords)
        returns.append(sum(found[1]["eval_episode_return"]) / len(found[1]["eval_episode_return"]))
        curve.append((num_steps[0], returns[-1]))
        return found

    def noting_collect(self: Any, *args: Any, **keywords: Any) -> Any:
        found = collect(self, *args, **keywords)
        num_steps[0] = self.envstep
        return found

    InteractionSerialEvaluator.eval, SampleSerialCollector.collect = noting_eval, noting_collect
    began = time.perf_counter()
    serial_pipeline((main_cfg, create_cfg), seed=0, max_train_iter=num_iterations)
    seconds = time.perf_counter() - began
    assert num_iterations < MANY or max(returns) > LEARNED, f"the mean returns are {returns}"
    result = {
        "manager": f"{cls.__module__}.{cls.__name__}",
        "what": f"dizoo's DQN on CartPole-v0, env manager '{manager}', {num_iterations} iterations",
        "steps": num_steps[0],
        "reward": ", ".join(f"{value:.1f}" for value in (returns[0], max(returns))) + " (first evaluation, best)",
        "seconds": seconds,
        "curve": curve,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

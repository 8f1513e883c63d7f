"""DI-engine's own CartPole DQN, shortened: `python -m tests.originals.di_engine_pipeline WHOSE MANAGER ITERATIONS`, in an empty folder.

WHOSE is "ours" or "original"; MANAGER a name of DI-engine's registry; ITERATIONS how long to train. Of dizoo's config
only the manager's name is changed. Prints, as its last line, JSON: class of the manager, seconds.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from typing import Any


def main(whose: str, manager: str, num_iterations: int) -> None:
    """Train, and print what came of it."""
    from ding.entry import serial_pipeline
    from ding.envs import get_env_manager_cls
    from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

    main_cfg: Any = copy.deepcopy(main_config)
    create_cfg: Any = copy.deepcopy(create_config)
    create_cfg.env_manager.type = manager
    if whose == "ours":
        importlib.import_module("stepmill.frontends.di_engine")
    cls = get_env_manager_cls(create_cfg.env_manager)
    began = time.perf_counter()
    serial_pipeline((main_cfg, create_cfg), seed=0, max_train_iter=num_iterations)
    seconds = time.perf_counter() - began
    print(json.dumps({"manager": f"{cls.__module__}.{cls.__name__}", "seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

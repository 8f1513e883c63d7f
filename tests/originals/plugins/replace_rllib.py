"""A pytest plugin: RLlib's env runners make stepmill's vector envs, in Ray's workers too."""

from __future__ import annotations

from typing import Any

import ray
import replace_make_vec  # noqa: F401

_init = ray.init
HOOK = "replace_make_vec.replace"
NUM_CPUS = 8  # that Ray believes in: one test starts five env runners with a CPU each


def _init_with_ours(**keywords: Any) -> Any:
    """Start Ray so that its workers replace `gymnasium.make_vec`, too."""
    return _init(**{"num_cpus": NUM_CPUS, "runtime_env": {"worker_process_setup_hook": HOOK}, **keywords})


ray.init = _init_with_ours

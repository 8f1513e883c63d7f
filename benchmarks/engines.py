"""The engines by name: the adapter, the environment and the options of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.paths import DIENGINE, ENVPOOL, FRONTENDS, OURS, PEERS


@dataclass(frozen=True)
class EngineSpec:
    """One engine in one configuration.

    Attributes:
        name: the name on the command line and in raw results.
        title: the title of its row in the tables.
        packages: distributions whose versions the report shows.
    """

    name: str
    title: str
    adapter: str
    venv: str = PEERS
    options: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    def with_options(self, title: str | None = None, **options: Any) -> EngineSpec:
        """Return the same engine with other options."""
        return replace(self, title=title or self.title, options={**self.options, **options})


_ALL = (
    EngineSpec("bare", "bare loop, one core", "bare"),
    EngineSpec("ceiling", "**ceiling** (two pinned loops)", "ceiling"),
    EngineSpec("gym-sync", "Gymnasium Sync", "gym_sync", packages=("gymnasium",)),
    EngineSpec(
        "gym-sync-copy", "Gymnasium Sync, copy=True", "gym_sync", options={"copy": True}, packages=("gymnasium",)
    ),
    EngineSpec(
        "gym-async-2",
        "Gymnasium Async, max_concurrency=2",
        "gym_async",
        options={"max_concurrency": 2},
        packages=("gymnasium",),
    ),
    EngineSpec("gym-async", "Gymnasium Async, copy=False", "gym_async", packages=("gymnasium",)),
    EngineSpec(
        "gym-async-copy", "Gymnasium Async, copy=True", "gym_async", options={"copy": True}, packages=("gymnasium",)
    ),
    EngineSpec("gym-numpy", "Gymnasium make_vec, NumPy batch", "gym_numpy", packages=("gymnasium",)),
    EngineSpec("sb3", "SB3 SubprocVecEnv", "sb3", packages=("stable-baselines3",)),
    EngineSpec("sb3-dummy", "SB3 DummyVecEnv", "sb3", options={"in_line": True}, packages=("stable-baselines3",)),
    EngineSpec("tianshou", "Tianshou ShmemVectorEnv", "tianshou_venv", packages=("tianshou",)),
    EngineSpec("torchrl", "TorchRL ParallelEnv", "torchrl_parallel", packages=("torchrl", "torch")),
    EngineSpec("diengine", "DI-engine subprocess", "diengine", DIENGINE, packages=("di-engine",)),
    EngineSpec("puffer-1w", "PufferLib, 1 worker", "puffer", options={"num_workers": 1}),
    EngineSpec("puffer-2w-async", "PufferLib, 2 workers, async", "puffer", options={"num_workers": 2}),
    EngineSpec("puffer-2w-sync", "PufferLib, 2 workers, sync", "puffer", options={"num_workers": 2}),
    EngineSpec("envpool-sync", "EnvPool C++, sync", "envpool_cpp", ENVPOOL, packages=("envpool",)),
    EngineSpec("envpool-async", "EnvPool C++, async", "envpool_cpp", ENVPOOL, packages=("envpool",)),
    EngineSpec("ale-sync", "ALE C++ vector env, sync", "ale_vector", packages=("ale-py",)),
    EngineSpec("ale-async", "ALE C++ vector env, async", "ale_vector", packages=("ale-py",)),
    EngineSpec(
        "stepmill-serial",
        "**stepmill** serial",
        "stepmill_vector",
        OURS,
        {"backend": "serial", "num_workers": 0},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-thread",
        "**stepmill** thread, 2 workers",
        "stepmill_vector",
        OURS,
        {"backend": "thread", "num_workers": 2},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-1w",
        "**stepmill** process, 1 worker",
        "stepmill_vector",
        OURS,
        {"backend": "process", "num_workers": 1},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-2w",
        "**stepmill** process, 2 workers",
        "stepmill_vector",
        OURS,
        {"backend": "process", "num_workers": 2},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-deadlines",
        "**stepmill** process, 2 workers, deadlines",
        "stepmill_vector",
        OURS,
        {"backend": "process", "num_workers": 2, "pool": {"step_timeout_s": 10.0, "reset_timeout_s": 60.0}},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-replay",
        "**stepmill** process, 2 workers, replay",
        "stepmill_vector",
        OURS,
        {"backend": "process", "num_workers": 2, "pool": {"on_fault": "replay", "seeding": "per_episode"}},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-8w",
        "**stepmill** process, 8 workers",
        "stepmill_vector",
        OURS,
        {"backend": "process", "num_workers": 8},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-kernel", "**stepmill** kernel, 2 threads", "stepmill_kernel", OURS, {"num_workers": 2}, ("stepmill",)
    ),
    EngineSpec("multi-env-pipes", "MultiEnv with a thread and a pipe per env", "multi_env_pipes", OURS),
    EngineSpec("multi-env", "**stepmill** MultiEnv", "multi_env", OURS, {"num_workers": 2}, ("stepmill",)),
    EngineSpec("unity-queue", "ML-Agents with pickles and a queue", "unity_queue", OURS),
    EngineSpec("unity-manager", "**stepmill** ML-Agents", "unity_manager", OURS, {}, ("stepmill",)),
    EngineSpec(
        "stepmill-diengine",
        "**stepmill** DI-engine, sync",
        "stepmill_diengine",
        OURS,
        {"num_workers": 2},
        ("stepmill",),
    ),
    EngineSpec("sb3-stepmill", "**stepmill** SB3", "sb3_stepmill", FRONTENDS, {"num_workers": 2}, ("stepmill",)),
    EngineSpec(
        "tianshou-stepmill", "**stepmill** Tianshou", "tianshou_stepmill", FRONTENDS, {"num_workers": 2}, ("stepmill",)
    ),
    EngineSpec(
        "alf-arrays",
        "**stepmill** ALF, arrays",
        "alf_parallel",
        OURS,
        {"num_workers": 2, "as_tensors": False},
        ("stepmill",),
    ),
    EngineSpec(
        "alf-tensors",
        "**stepmill** ALF, tensors",
        "alf_parallel",
        FRONTENDS,
        {"num_workers": 2, "as_tensors": True},
        ("stepmill",),
    ),
    EngineSpec(
        "torchrl-stepmill",
        "**stepmill** TorchRL env, 2 workers",
        "torchrl_stepmill",
        FRONTENDS,
        {"backend": "process", "num_workers": 2},
        ("stepmill", "torchrl"),
    ),
    EngineSpec(
        "torchrl-envpool",
        "TorchRL MultiThreadedEnv over EnvPool",
        "torchrl_envpool",
        FRONTENDS,
        {"is_own": True},
        ("torchrl", "envpool"),
    ),
    EngineSpec(
        "torchrl-envpool-resets",
        "TorchRL MultiThreadedEnv over EnvPool, with resets",
        "torchrl_envpool",
        FRONTENDS,
        {"is_own": True, "resets": True},
        ("torchrl", "envpool"),
    ),
    EngineSpec(
        "stepmill-envpool",
        "**stepmill** MultiThreadedEnv over EnvPool",
        "torchrl_envpool",
        FRONTENDS,
        {"is_own": False},
        ("stepmill", "envpool"),
    ),
    EngineSpec(
        "stepmill-async",
        "**stepmill** process, 2 workers, async",
        "stepmill_pool",
        OURS,
        {"backend": "process", "num_workers": 2},
        ("stepmill",),
    ),
    EngineSpec(
        "stepmill-async-thread",
        "**stepmill** thread, async",
        "stepmill_pool",
        OURS,
        {"backend": "thread", "num_workers": 2},
        ("stepmill",),
    ),
)

ENGINES = {spec.name: spec for spec in _ALL}
PUFFERS = ("puffer-1w", "puffer-2w-async", "puffer-2w-sync")
GYMNASIUMS = ("gym-sync", "gym-sync-copy", "gym-async", "gym-async-copy", "gym-async-2")
PIPES = ("sb3", "tianshou", "diengine", "torchrl")

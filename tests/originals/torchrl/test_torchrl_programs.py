"""TorchRL's tutorial on collectors, with ParallelEnv and with StepmillEnv: the same data.

The tutorial comes from the checkout `rl` (pytorch/rl) in the folder $STEPMILL_ORIGINALS.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from torchrl.envs import (  # noqa: E402
    AsyncEnvPool,
    GymEnv,
    MultiThreadedEnv,
    MultiThreadedEnvWrapper,
    ParallelEnv,
    set_gym_backend,
)

from stepmill.frontends import torchrl as frontend  # noqa: E402
from stepmill.frontends.torchrl import StepmillEnv  # noqa: E402
from tests.originals.pages import run_page  # noqa: E402
from tests.originals.signatures import check_listed, differences  # noqa: E402

CHECKOUT = Path(os.environ.get("STEPMILL_ORIGINALS", "/nowhere"), "rl")
TUTORIAL = CHECKOUT / "tutorials" / "sphinx-tutorials" / "getting-started-3.py"
SEEDS = [0, 11, 22, 33]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # TorchRL's
    pytest.mark.skipif(not TUTORIAL.exists(), reason="needs TorchRL's checkout; make test-originals has it"),
]


def parallel_env(name: str) -> Any:
    """Return TorchRL's env, whose envs have been seeded and reset."""
    set_gym_backend("gymnasium").set()

    def make(seed: int) -> Any:
        env = GymEnv(name)
        env.set_seed(seed, static_seed=True)
        return env

    return ParallelEnv(4, [lambda seed=seed: make(seed) for seed in SEEDS], mp_start_method="fork")


def stepmill_env(name: str) -> Any:
    """Return ours. TorchRL's GymEnv resets an env when it is seeded, so this one is reset, too."""
    env = StepmillEnv([lambda: gymnasium.make(name)] * 4, context="fork", num_workers=2)
    env.set_seed(SEEDS)
    env.reset()
    return env


@pytest.mark.covers("T-12", "T-3", "G-16/torchrl")
def test_the_tutorial_on_collectors_collects_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = TUTORIAL.read_text(encoding="utf-8").splitlines()
    made = [number for number, line in enumerate(lines) if line.startswith('env = GymEnv("CartPole-v1")')]
    seeded = [number for number, line in enumerate(lines) if line.startswith("env.set_seed(0)")]
    stored = [number for number, line in enumerate(lines) if line == "indices = buffer.extend(data)"]
    counted = [number for number, line in enumerate(lines) if line.endswith("== collector.frames_per_batch")]
    assert [len(found) for found in (made, seeded, stored, counted)] == [1] * 4  # or the tutorial has changed
    lines[made[0]], lines[seeded[0]] = "env = make_env('CartPole-v1')", "torch.manual_seed(0)"
    lines[stored[0]] = "indices = buffer.extend(data.reshape(-1))"  # the tutorial's env is a single one
    lines[counted[0]] += " * 4"
    code = compile("\n".join(lines), str(TUTORIAL), "exec")
    monkeypatch.chdir(tmp_path)
    collected = []
    for make_env in (parallel_env, stepmill_env):
        variables: dict[str, Any] = {"make_env": make_env, "__name__": "tutorial"}
        exec(code, variables)
        collected.append(variables["data"].clone())
        assert len(variables["buffer"]) == 200
        variables["collector"].shutdown()
    theirs, ours = collected
    assert theirs.batch_size == ours.batch_size == (4, 50)
    assert set(theirs.keys(True, True)) == set(ours.keys(True, True))
    for key in theirs.keys(True, True):
        assert (theirs[key].dtype, theirs[key].shape) == (ours[key].dtype, ours[key].shape), key
        assert torch.equal(theirs[key], ours[key]), key
    assert theirs["next", "done"].any()  # episodes ended, and others began


# "CLASS.METHOD(PARAMETER): how it differs", and words of the row of the page that says so.
_BARE = "| `git_url`, `libname`, `available_envs`, `wrapper_frame_skip` of `MultiThreadedEnv` |"
_OF_QUEUES = "| `AsyncEnvPool`: `env_batch_sizes`, `exchange_keys`, `resolved_exchange`, `stats(reset=)` |"
_OF_WORKERS = "| `non_blocking`, `select_and_clone` |"
DIFFERENCES = {
    "StepmillEnv.__init__(num_workers): by keyword only": "| First arguments of `StepmillEnv` |",
    "StepmillEnv.__init__(create_env_fn): by keyword only": "| First arguments of `StepmillEnv` |",
    "StepmillEnv.__init__(env_fns): required": "| First arguments of `StepmillEnv` |",
    **{
        f"{cls}.{name}: missing": _OF_WORKERS
        for cls in ("StepmillEnv", "ParallelEnv")
        for name in ("non_blocking", "select_and_clone")
    },
    **{
        f"{cls}.{name}: missing": _BARE
        for cls in ("MultiThreadedEnv", "MultiThreadedEnvWrapper")
        for name in ("available_envs", "git_url", "libname")
    },
    "AsyncStepmillEnv.__init__(env_makers): by keyword only": "| `AsyncEnvPool`: `env_makers`, `backend`, `stack`,",
    "AsyncStepmillEnv.__init__(env_fns): required": "| `AsyncEnvPool`: `env_makers`, `backend`, `stack`,",
    **{
        f"AsyncStepmillEnv.{name}: missing": _OF_QUEUES
        for name in ("env_batch_sizes", "exchange_keys", "resolved_exchange", "stats(reset)")
    },
}


@pytest.mark.covers("T-12")
def test_the_signatures_are_torchrls_but_for_what_the_page_says() -> None:
    found = []
    for ours, theirs in (
        (frontend.StepmillEnv, ParallelEnv),
        (frontend.ParallelEnv, ParallelEnv),
        (frontend.MultiThreadedEnv, MultiThreadedEnv),
        (frontend.MultiThreadedEnvWrapper, MultiThreadedEnvWrapper),
        (frontend.AsyncStepmillEnv, AsyncEnvPool),
    ):
        found += [f"{ours.__name__}.{each}" for each in differences(ours, theirs)]
    check_listed("torchrl", found, DIFFERENCES)


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("is_original", [True, False])
def test_the_pages_program_runs_with_either(tmp_path: Path, is_original: bool) -> None:
    run_page("torchrl", tmp_path, is_original=is_original)

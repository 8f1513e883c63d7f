"""DI-engine's own pipeline trains through our managers, found by its own factory, with its config as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ding") is None, reason="DI-engine is not installed; make test-originals has it"
)


@pytest.mark.timeout(500)
@pytest.mark.covers("D-29/registry")
@pytest.mark.parametrize(
    ("whose", "manager", "cls"),
    [
        ("ours", "subprocess", "stepmill.frontends.di_engine.managers.SyncSubprocessEnvManager"),
        ("ours", "base", "stepmill.frontends.di_engine.managers.BaseEnvManager"),
        ("original", "subprocess", "ding.envs.env_manager.subprocess_env_manager.SyncSubprocessEnvManager"),
    ],
)
def test_cartpole_dqn_trains(tmp_path: Path, whose: str, manager: str, cls: str) -> None:
    command = [sys.executable, "-m", "tests.originals.di_engine.train", whose, manager, "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=480, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert result["manager"] == cls
    assert list(tmp_path.glob("cartpole_dqn_seed0*/ckpt/*.pth.tar"))
    print(f"{whose} {manager}: {result['seconds']:.1f} s")

"""The machine, the versions and the commit, for the head of every report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES
from benchmarks.paths import DIENGINE, ENVPOOL, OURS, PEERS, PUFFER, ROOT, driver_environment, interpreter_of

_PRINT_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = "missing"
print(json.dumps(found))
"""


def describe() -> dict[str, Any]:
    """Return the machine, the commit, and the versions of each environment."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "commit": _commit(),
        "versions": {venv: _versions(venv) for venv in (OURS, PEERS, DIENGINE, ENVPOOL)},
        "pufferlib": "3.0.0 (vector files of the sdist)" if (PUFFER / "pufferlib").exists() else "missing",
    }


def as_markdown(facts: dict[str, Any]) -> list[str]:
    """Return the head of the report as lines."""
    lines = [
        f"- Machine: {facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}",
        f"- Commit: {facts['commit']}",
    ]
    for venv, versions in facts["versions"].items():
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(f"- {venv}: {named or 'not set up'}")
    lines.append(f"- PufferLib: {facts['pufferlib']}")
    return lines


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes in src" if changed else "")


def _versions(venv: str) -> dict[str, str]:
    packages = {"numpy", "gymnasium"}
    for spec in ENGINES.values():
        if spec.venv == venv:
            packages.update(spec.packages)
    python = interpreter_of(venv)
    if not python.exists():
        return {}
    done = subprocess.run(
        [str(python), "-c", _PRINT_VERSIONS, *sorted(packages)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=driver_environment(),
    )
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found

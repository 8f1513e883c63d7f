"""Runs DI-engine's own tests of its env managers twice: with its classes, and with stepmill's in their place.

Prints a table of both. tests/originals/di_engine.toml says which fail, and why; any other failure, and any test that passes
against that list, makes the exit status 1. Then stepmill's own tests of the front-end run in that environment, too:
those that compare with the originals, and a real pipeline.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from diengine_env import ROOT, make_diengine_env

if sys.version_info >= (3, 11):
    import tomllib

LIST = ROOT / "tests" / "originals" / "di_engine.toml"
SHARDS = {  # most of these tests sleep: four at a time do not disturb each other
    "base": ["test_base_env_manager.py"],
    "subprocess": ["test_subprocess_env_manager.py", "test_shm.py"],
    "supervisor": ["test_env_supervisor.py", "-k", "TestEnvSupervisorCompatible"],
    "supervisor-async": ["test_env_supervisor.py", "-k", "TestEnvSupervisor and not Compatible"],
}
TEST_LIMIT_S = 60  # of a test that has no limit of its own
OWN_TESTS = ["tests/originals", "tests/frontends/di_engine"]


def main() -> int:
    """Run everything; 0 if it went as listed."""
    python = make_diengine_env()
    expected = tomllib.loads(LIST.read_text(encoding="utf-8"))
    found = {which: run_originals(python, which) for which in ("original", "ours")}
    excesses = print_table(found, expected)
    for excess in excesses:
        print(excess)
    print("stepmill's own tests, beside DI-engine", flush=True)
    # What DI-engine imports warns of much that is none of our business.
    command = [str(python), "-m", "pytest", "-q", "-o", "filterwarnings=default", "-m", "not soak", *OWN_TESTS]
    command += ["--covers=build/covers/originals.json"]
    own = subprocess.run(command, cwd=ROOT, check=False)
    return 1 if excesses or own.returncode else 0


def run_originals(python: Path, which: str) -> dict[str, bool]:
    """Return by test whether it passed, with the classes of `which`."""
    own = ["-p", "tests.originals.di_engine_ours"] if which == "ours" else []
    with tempfile.TemporaryDirectory(prefix="stepmill-originals-") as folder:
        running = [start_shard(python, shard, own, Path(folder)) for shard in SHARDS]
        for process in running:
            process.wait()
        outcomes: dict[str, bool] = {}
        for shard in SHARDS:
            outcomes.update(read_outcomes(Path(folder, f"{shard}.xml"), Path(folder, f"{shard}.log")))
    return outcomes


def start_shard(python: Path, shard: str, own: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Begin to run one shard; its report and its log go into the folder."""
    home = python.parent.parent / "lib" / "python3.11" / "site-packages" / "ding" / "envs" / "env_manager" / "tests"
    selection = [str(home / word) if word.endswith(".py") else word for word in SHARDS[shard]]
    command = [str(python), "-m", "pytest", *own, "-q", "--tb=no", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [
        "--rootdir",
        str(home),
        "--timeout",
        str(TEST_LIMIT_S),
        "--junitxml",
        f"{folder}/{shard}.xml",
        *selection,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / f"{shard}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def read_outcomes(report: Path, log: Path) -> dict[str, bool]:
    """Return by test whether it passed; raise if there is no report."""
    if not report.exists():
        raise SystemExit(f"a run ended without a report:\n{log.read_text(encoding='utf-8')[-4000:]}")
    cases = ET.parse(report).iter("testcase")
    return {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": not any(
            part.tag in ("failure", "error") for part in case
        )
        for case in cases
    }


def print_table(found: dict[str, dict[str, bool]], expected: dict[str, dict[str, str]]) -> list[str]:
    """Print what became of each test; return what is not as listed."""
    excesses = []
    unsteady = expected.get("original_unsteady", {})
    names = sorted({*found["original"], *found["ours"], *expected["original"], *expected["ours"]})
    width = max(map(len, names))
    print(f"{'test':{width}}  original  ours")
    for name in names:
        words = []
        for which in ("original", "ours"):
            outcome = found[which].get(name)
            words.append({True: "passed", False: "failed", None: "not run"}[outcome])
            listed = name in expected[which]
            if which == "original" and name in unsteady:
                continue
            if outcome is None or outcome is listed:
                excesses.append(f"unexpected: {name} {words[-1]} with {which} classes")
        reason = expected["ours"].get(name) or expected["original"].get(name) or unsteady.get(name, "")
        print(f"{name:{width}}  {words[0]:8}  {words[1]:8}  {reason}")
    return excesses


if __name__ == "__main__":
    sys.exit(main())

"""Runs the tests of other libraries with stepmill's classes instead of theirs: `test_originals.py [SUITE ...]`.

The tests come from checkouts in the folder $STEPMILL_ORIGINALS (docs/originals.md lists them). Suites without a checkout are
left out, and the last lines name them. tests/originals/suites lists the cases that fail, with the reason. The exit status is 1
if another case fails, or if a listed case passes. The results of all suites, of this run and of earlier runs, are written to
docs/originals.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from diengine_env import ROOT
from originals_envs import MissingToolError, make_environment, read_commit
from originals_report import Result, read_result, write_report
from originals_suites import Suite, read_suites, reason_of, unexpected

PLUGINS = ROOT / "tests" / "originals" / "plugins"
SOURCES = "STEPMILL_ORIGINALS"
TRAINING_LIMIT_S = 900


def main() -> int:
    """Run the suites. The exit status is 0 if exactly the listed cases fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", help="names of files in tests/originals/suites; none is all")
    parser.add_argument("--compare", action="store_true", help="run every suite with the original's own classes, too")
    parser.add_argument(
        "--no-training", action="store_true", help="leave trainings out; the page keeps their last results"
    )
    given = parser.parse_args()
    faults: list[str] = []
    left_out: list[str] = []
    with ThreadPoolExecutor(1) as maker:  # environments are made one after the other, beside tests, of which many sleep
        suites = read_suites(given.suites)
        places = [maker.submit(make_place, suite) for suite in suites]
        for suite, place in zip(suites, places, strict=True):
            if not suite.needs_source and not has_checkout(suite):
                left_out.append(f"{suite.title}: its own tests; there is no checkout of {suite.source} in ${SOURCES}")
            try:
                found = run_suite(
                    suite, place.result(), compare=given.compare or suite.compares, trains=not given.no_training
                )
            except MissingToolError as missing:
                left_out.append(f"{suite.title}: {missing}")
                continue
            faults += [f"{suite.title}: {fault}" for fault in found]
    write_report()
    for line in left_out:
        print(f"left out: {line}")
    for fault in faults:
        print(f"fault: {fault}")
    return 1 if faults else 0


@dataclass(frozen=True)
class Place:
    """Where a suite runs: the Python of its environment, the folders that its programs need on their path, and the checkout."""

    python: Path
    path: list[Path]
    source: Path | None


def make_place(suite: Suite) -> Place:
    """Make the environment of a suite.

    Raises:
        MissingToolError: it needs what this machine does not have.
    """
    source = checkout_of(suite) if suite.needs_source or has_checkout(suite) else None
    return Place(*make_environment(suite.environment, source), source)


def run_suite(suite: Suite, place: Place, *, compare: bool, trains: bool) -> list[str]:
    """Run one suite and store its result, with its last training if `trains` is False; return the cases that differ from the list."""
    print(f"{suite.title}: its own tests", flush=True)
    began = time.monotonic()
    runs_cases = bool(suite.shards) and not (suite.source and place.source is None)
    outcomes = run_cases(suite, place, [suite.plugin]) if runs_cases else {}
    faults = unexpected(outcomes, suite.ours, suite.ours_unsteady) if runs_cases else []
    if compare and runs_cases:
        original = run_cases(suite, place, ["end_hanging_cases"], hanging=suite.original_hanging)
        found = unexpected(original, suite.original, suite.original_unsteady)
        faults += [f"with its own classes, {fault}" for fault in found]
    for case in sorted(outcomes):
        if outcomes[case] == "failed":
            print(f"  {case}: {reason_of(case, {**suite.ours, **suite.ours_unsteady}) or 'NOT LISTED'}")
    num_own = run_own_tests(suite, place, faults) if suite.own_tests else 0
    seconds = time.monotonic() - began
    last = read_result(suite.name)
    training = None if last is None else last.training
    if suite.training and trains:
        training = run_training(suite, place, faults)
    counts = {kind: sum(outcome == kind for outcome in outcomes.values()) for kind in ("passed", "failed", "skipped")}
    if not runs_cases and last is not None:
        counts = {"passed": last.passed, "failed": last.failed, "skipped": last.skipped}
    result = Result(
        suite=suite.name,
        title=suite.title,
        version=version_of(suite, place),
        commit=read_commit(place.source) if place.source is not None else "" if last is None else last.commit,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        seconds=seconds,
        **counts,
        faults=len(faults),
        own_tests=num_own,
        training=training,
    )
    store(result)
    print(f"  {counts}, {num_own} tests of stepmill, {len(faults)} faults, {seconds:.0f} s", flush=True)
    return faults


def has_checkout(suite: Suite) -> bool:
    """Whether there is a checkout of a suite's sources."""
    return Path(os.environ.get(SOURCES) or os.devnull, suite.source).is_dir()


def checkout_of(suite: Suite) -> Path | None:
    """Return the folder of a suite's sources; None if they come with the package.

    Raises:
        MissingToolError: they are not there.
    """
    if not suite.source:
        return None
    folder = os.environ.get(SOURCES)
    if not folder:
        raise MissingToolError(f"set {SOURCES} to the folder that has its checkout as {suite.source}/")
    source = Path(folder, suite.source)
    if not source.is_dir():
        raise MissingToolError(f"there is no {source}")
    return source.resolve()


def run_cases(suite: Suite, place: Place, plugins: list[str], *, hanging: Sequence[str] = ()) -> dict[str, str]:
    """Return, for each case, whether it passed, failed or was skipped. `hanging`: cases that are ended soon."""
    package = place.python.parent.parent / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    with tempfile.TemporaryDirectory(prefix="stepmill-originals-") as name:
        folder = Path(name)
        if place.source is not None:
            for part in suite.copy:
                copy_part(place.source / part, folder / part)
        running = []
        for number, shard in enumerate(suite.shards):
            words = [
                word.replace("PACKAGE", str(package)).replace("PATH", str(place.path[0]) if place.path else "")
                for word in shard
            ]
            running.append(start_shard(suite, place, plugins, folder / f"{number}", words, hanging))
        outcomes: dict[str, str] = {}
        for number, process in enumerate(running):
            try:
                process.wait(suite.limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            outcomes.update(read_outcomes(folder / f"{number}.xml", folder / f"{number}.log"))
    return outcomes


def copy_part(source: Path, target: Path) -> None:
    """Copy a folder or a file."""
    if source.is_dir():
        shutil.copytree(source, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def start_shard(
    suite: Suite, place: Place, plugins: list[str], report: Path, words: list[str], hanging: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start one run of pytest. Its report and its log are written to the same folder."""
    command = [str(place.python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
    for plugin in plugins:
        command += ["-p", plugin]
    command += ["--rootdir", str(report.parent), "--timeout", str(suite.test_limit_s)]
    command += ["--junitxml", f"{report}.xml", *words]
    own = [*map(str, place.path), str(report.parent), str(PLUGINS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(own), "STEPMILL_HANGING": json.dumps(hanging)}
    environment.setdefault("SDL_VIDEODRIVER", "dummy")  # games are drawn without a display
    environment.setdefault("OMP_NUM_THREADS", "1")  # runs share the cores, and torch's threads spin while they wait
    with open(f"{report}.log", "wb") as log:
        return subprocess.Popen(command, cwd=report.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)


def read_outcomes(report: Path, log: Path) -> dict[str, str]:
    """Return the outcome of each case. Exit with an error if there is no report."""
    text = log.read_text(encoding="utf-8", errors="replace")
    kept = ROOT / "build" / "originals" / f"log-{os.getpid()}-{report.stem}.txt"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(text, encoding="utf-8")
    if not report.exists():
        raise SystemExit(f"a run ended without a report:\n{text[-4000:]}")
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        tags = {part.tag for part in case}
        outcomes[name] = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
    if not outcomes:
        raise SystemExit(f"a run had no cases:\n{text[-4000:]}")
    return outcomes


def run_own_tests(suite: Suite, place: Place, faults: list[str]) -> int:
    """Run stepmill's own tests in the environment of the original; return how many passed, and add to the faults."""
    print(f"{suite.title}: stepmill's own tests", flush=True)
    # What the originals import warns of much that is none of our business.
    command = [
        str(place.python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "4",
        "--dist",
        "worksteal",
        "-o",
        "filterwarnings=default",
    ]
    command += ["-m", "not soak", *suite.own_tests, f"--covers=build/covers/originals-{suite.name}.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, place.path))}
    report = ROOT / "build" / "originals" / f"own-{suite.name}.xml"
    report.unlink(missing_ok=True)
    run = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment, check=False)
    if run.returncode:
        faults.append("stepmill's own tests failed")
    cases = ET.parse(report).iter("testcase") if report.exists() else ()
    return sum(not {part.tag for part in case} & {"failure", "error", "skipped"} for case in cases)


def run_training(suite: Suite, place: Place, faults: list[str]) -> dict[str, object] | None:
    """Run a training program, and return its last line of output and its command."""
    print(f"{suite.title}: a training", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, place.path)])}
    with tempfile.TemporaryDirectory(prefix="stepmill-training-") as folder:
        command = [str(place.python), "-m", *suite.training]
        try:
            run = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TRAINING_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            faults.append(f"the training took longer than {TRAINING_LIMIT_S} s")
            return None
    lines = run.stdout.splitlines()
    if run.returncode or not lines:
        faults.append(f"the training failed:\n{run.stdout[-1000:]}{run.stderr[-3000:]}")
        return None
    told: dict[str, object] = json.loads(lines[-1])
    return {"command": "python -m " + " ".join(suite.training), **told}


def version_of(suite: Suite, place: Place) -> str:
    """Return the version of the library that ran; a checkout without a version has none."""
    ask = f"import importlib.metadata as m; print(m.version({suite.package!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, place.path))}
    run = subprocess.run([str(place.python), "-c", ask], env=environment, check=False, capture_output=True, text=True)
    return run.stdout.strip()


def store(result: Result) -> None:
    """Store a result for the report."""
    folder = ROOT / "build" / "originals"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.suite}.json").write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Record the learning curves of ALF's, DI-engine's and ML-Agents' own trainings: `record_curves.py [alf] [di_engine] [mlagents]`.

Each is the training of `make test-originals`, with the original class and with stepmill's. Writes docs/plots/NAME.csv, from which
`scripts/docs_pages.py --write` makes the picture. ALF's sources come from a checkout in $STEPMILL_ORIGINALS.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from diengine_env import ROOT
from originals_suites import Suite, read_suites
from test_originals import make_place

NAMES = ("alf", "di_engine", "mlagents")
PLOTS = ROOT / "docs" / "plots"
LIMIT_S = 3600


def train(suite: Suite, python: Path, path: Sequence[Path], whose: str) -> dict[int, float]:
    """Train, and return the mean return by the number of env-steps."""
    module, _, *rest = suite.training
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)])}
    with tempfile.TemporaryDirectory(prefix="stepmill-training-") as folder:
        command = [str(python), "-W", "ignore", "-m", module, whose, *rest]
        run = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S
        )
    return {steps: round(value, 2) for steps, value in json.loads(run.stdout.splitlines()[-1])["curve"]}


def write_curves(file: Path, original: dict[int, float], ours: dict[int, float]) -> None:
    """Write both curves, a row for each number of env-steps that one of them has."""
    with file.open("w", encoding="utf-8", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["env-steps", "mean return with the original class", "with stepmill's class"])
        rows.writerows([steps, original.get(steps, ""), ours.get(steps, "")] for steps in sorted({*original, *ours}))


if __name__ == "__main__":
    for suite in read_suites(sys.argv[1:] or NAMES):
        place = make_place(suite)
        original, ours = (train(suite, place.python, place.path, whose) for whose in ("original", "ours"))
        print(
            f"{suite.title}: {len(ours)} points, {sum(ours[at] == original.get(at) for at in ours)} of them equal",
            flush=True,
        )
        write_curves(PLOTS / f"{suite.name}.csv", original, ours)

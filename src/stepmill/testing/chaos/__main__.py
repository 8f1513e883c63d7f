"""The command line of `stepmill.testing.chaos`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stepmill.testing.chaos import ChaosReport, run_chaos
from stepmill.testing.chaos.kinds import KINDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run chaos as the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stepmill.testing.chaos", description=run_chaos.__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round-seconds", type=float, default=10.0)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kind", action="append", choices=names, help="only rounds of this kind; may be repeated")
    chosen = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if chosen.kind is None or kind.name in chosen.kind]
    report = run_chaos(chosen.seconds, chosen.seed, round_s=chosen.round_seconds, kinds=kinds, on_pass=_print_progress)
    sys.stdout.write(f"{report}\n")
    return 1 if report.num_wrong else 0


def _print_progress(report: ChaosReport) -> None:
    """Print what was found so far: a long run shows its failures early."""
    sys.stderr.write(f"chaos: {report.seconds:.0f} s, {report.transitions} transitions, {report.num_wrong} wrong\n")
    sys.stderr.writelines(f"  {complaint}\n" for complaint in report.wrong)


if __name__ == "__main__":
    sys.exit(main())

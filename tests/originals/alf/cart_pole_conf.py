"""A configuration for ALF's trainer, `python -m alf.bin.train --root_dir FOLDER --conf FILE`: that of train.py.

The environment variable WHOSE is "ours" or "original". At exit, its output's last line is JSON: the names of configured
values that nothing has used.
"""

import atexit
import json
import os

import alf

from tests.originals.alf.train import configure


def report() -> None:
    """Print what nothing has used."""
    print(json.dumps({"inoperative": [name for name, _ in alf.get_inoperative_configs()]}), flush=True)


atexit.register(report)
configure(os.environ["WHOSE"], 2)

"""Another Python for the tests of `stepmill.foreign`: this interpreter, without what `.pth` files add, so without stepmill."""

import sys
from pathlib import Path

import numpy as np

ENVS = Path(__file__).with_name("simulator_envs.py")
OTHER_PYTHON = ["env", f"PYTHONPATH={Path(np.__file__).parents[1]}", sys.executable, "-S"]

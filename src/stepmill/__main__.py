"""`python -m stepmill` is the command `stepmill`."""

import sys

from stepmill.observe.cli import main

sys.exit(main())

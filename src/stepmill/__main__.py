"""`python -m stepmill` is the command `stepmill`."""

import sys

from stepmill.cli.main import main

sys.exit(main())

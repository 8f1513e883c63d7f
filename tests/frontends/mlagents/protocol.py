"""Names that the tests and their Unity player share."""

from __future__ import annotations

import uuid
from pathlib import Path

PLAYER = Path(__file__).with_name("player.py")
STATS_ID = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
FLOATS_ID = uuid.UUID("60ccf7d0-4f7e-11ea-b238-784f4387d1f7")
UNKNOWN_ID = uuid.UUID("00000000-0000-0000-0000-0000000000ff")
IMAGE = (4, 5, 3)

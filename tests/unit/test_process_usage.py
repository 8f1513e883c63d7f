"""What Linux says about processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from stepmill.observe.process_usage import children, cpu_seconds
from stepmill.worker.process_stat import process_state


def test_a_process_whose_name_is_not_utf8_can_be_read(tmp_path: Path):
    program = tmp_path / os.fsdecode(b"\xff")
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE) as child:
        assert process_state(child.pid) in ("R", "S", "D")
        assert child.pid in children()
        assert cpu_seconds(Path(f"/proc/{child.pid}")) < 60

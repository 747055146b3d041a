"""The command ditkit-ui, from its start, which needs no torch, to Ctrl-C."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

SECONDS = 90
"""Longest wait, on machines that are busy."""


def test_ctrl_c_ends_the_page_in_one_line(tmp_path: Path) -> None:
    program = shutil.which("ditkit-ui", path=sysconfig.get_path("scripts"))
    assert program is not None
    command = [program, "--no-browser", "--port=0"]
    # NiceGUI serves a test of its own where it finds pytest's variable.
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["PYTHONPROFILEIMPORTTIME"] = "1"  # a line on stderr for each module
    log = tmp_path / "errors"
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        address = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert address is not None
        deadline = time.monotonic() + SECONDS
        with socket.socket() as probe:  # the address is printed before the socket listens
            while probe.connect_ex(("127.0.0.1", int(address[1]))):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    lines = log.read_text("utf-8").splitlines()
    imported = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    assert process.returncode == 130
    assert [line for line in lines if not line.startswith("import time:")] == ["interrupted"]
    assert "nicegui" in imported and "torch" not in imported, "torch takes seconds: a worker has it"

"""The command ditkit-ui, from its start to Ctrl-C."""

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
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
    ) as process:
        assert process.stdout is not None
        address = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert address is not None
        deadline = time.monotonic() + SECONDS
        with socket.socket() as probe:  # the address is printed before the socket listens
            while probe.connect_ex(("127.0.0.1", int(address[1]))):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, errors) == (130, "interrupted\n")

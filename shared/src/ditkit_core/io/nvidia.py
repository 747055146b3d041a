"""The GPUs that NVIDIA's driver lists, without torch, whose import takes seconds."""

import shutil
import subprocess


def num_listed_gpus() -> int:
    """How many GPUs `nvidia-smi` lists; 0 where there is no such program, or it fails."""
    if (command := shutil.which("nvidia-smi")) is None:
        return 0
    try:
        listed = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return sum(line.startswith("GPU ") for line in lines)  # parts of one (MIG) are indented

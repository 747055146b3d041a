"""The container file, its start script and the Slurm job, as far as they can be checked without
Docker and Slurm; CI builds the image."""

import os
import re
import shutil
import subprocess

import pytest

from workspace import CORE, ROOT

UV = os.environ.get("UV") or shutil.which("uv")
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file with their arguments."""
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def test_every_instruction_is_one_and_the_image_begins_with_a_python_that_is_supported():
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", found[0][1])
    assert python and CORE.project["requires-python"] == f">={python[1]}"


def test_what_it_runs_is_shell_and_leaves_no_host_key():
    commands = [text for name, text in instructions() if name == "RUN"]
    for text in commands:
        done = subprocess.run(
            ["bash", "-n", "-c", text], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert len(commands) == 3 and re.search(
        r"install .*openssh-server.*&& rm -rf .*/etc/ssh/ssh_host_\*", commands[0]
    )


@pytest.mark.skipif(UV is None, reason="needs uv on the PATH")
def test_uv_takes_the_options_of_the_container_file():
    (sync,) = [text for name, text in instructions() if text.startswith("uv sync")]
    known = subprocess.run(
        [UV, "sync", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert [flag for flag in sync.split()[2:] if flag not in known] == []


def test_what_the_image_leaves_out_is_no_part_of_the_repository():
    left_out = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert {".git", ".venv", "runs"} <= set(left_out)
    assert not {
        "README.md",
        "LICENSE",
        "uv.lock",
        "pyproject.toml",
        "shared",
        "packages",
        "tools",
    } & set(left_out)


def test_the_start_script_is_shell_and_wants_a_key(tmp_path):
    script = ROOT / "tools" / "serve_ssh.sh"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "set PUBLIC_KEY" in done.stderr and not list(tmp_path.iterdir())
    text = script.read_text("utf-8")
    assert "PasswordAuthentication=no" in text and "ssh-keygen -A" in text


def test_the_job_starts_a_module_of_ours_and_passes_its_arguments_on(tmp_path):
    """In a stand-in for srun and torchrun, with options of sbatch alone in its head."""
    job = ROOT / "tools" / "job.slurm"
    options = re.findall(r"^#SBATCH (.*)$", job.read_text("utf-8"), re.MULTILINE)
    assert len(options) == 8 and all(
        re.fullmatch(r"--[a-z-]+=[\w:%@.-]+", option) for option in options
    )
    for name, text in {"srun": 'exec "$@"', "torchrun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "8"}
    done = subprocess.run(
        ["bash", job, "my run.toml"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        *(
            "--shutdown-timeout",
            "240",
            "--nproc-per-node",
            "8",
            "-m",
            "ditkit_wan.train",
            "my run.toml",
        )
    ]

"""The process that verifies exports: `python -m ditkit_core.diagnostics.verification.worker SPEC
FOLDER [NAME…]`, started by `verifier.py`.

It sees no GPU. It ends when no export is left or when its parent ends.
"""

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from ditkit_core.config.resolve import resolve
from ditkit_core.diagnostics.verification.verify import verify_waiting
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.worker_process import work
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run


def main(arguments: Sequence[str]) -> int:
    """Verify all exports of a run that have no result.

    Args:
        arguments: `ModelSpec.import_path`; the run's folder; names of exports to skip.

    Returns:
        The exit status of `work`.
    """
    import_path, folder, *skipped = arguments
    return work(lambda: verify_in(ModelSpec.at(import_path), Path(folder), skipped))


def verify_in(spec: ModelSpec, path: Path, skipped: Collection[str] = ()) -> None:
    """Verify what is left in a run's folder."""
    # The stored configuration: the parent has written what it resolved, flags included.
    config = resolve(RunConfig, stored=path).on_device("cpu")
    # Half of the cores at most: training starts its kernels from the others.
    torch.set_num_threads(config.train.threads or max(1, (os.cpu_count() or 1) // 2))
    verify_waiting(create_run(spec, config, fetch=True), RunFolder(path), skipped)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

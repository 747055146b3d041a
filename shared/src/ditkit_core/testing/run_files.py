"""Checks of the run files that a package ships."""

from pathlib import Path

from ditkit_core.config.resolve import resolve
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.plan import make_report
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.prepare import build_on_meta


def check_planned(spec: ModelSpec, file: Path, *, most_bytes: float) -> None:
    """Plan an unchanged run file for a GPU of 80 GiB, and check the planned bytes of weights against the model's parameters.

    Args:
        spec: The family.
        file: The run file; it names a preset.
        most_bytes: To be stayed below: bytes of frozen weights for each number, those that stay in fp32 included.
    """
    config = resolve(RunConfig, file=file)
    report = make_report(create_run(spec, config), "80GiB")
    (device,) = report.devices
    model = build_on_meta(spec, spec.architecture.presets[config.model.preset], Precision())
    count = sum(parameter.numel() for parameter in model.parameters())
    held = device.purposes
    if config.adapter.method == "full":
        assert held["weights"] == 0 and held["adapters"] >= 4 * count, (held, count)
        assert held["average"] >= (4 * count if config.ema.decay else 0), (held, count)
    else:
        assert 2 * count <= held["weights"] < most_bytes * count and held["adapters"] < 0.2 * count, (held, count)
    assert report.fits, held
    assert report.work.micro_batches == config.train.accumulation and config.model.preset in report.model, report.model

"""A setting that was added to `execution.py` alone, in the run file, in a run, in a search and
back, printed as JSON; a process of its own."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

DECLARED = '''
    haste: int = setting(3, resume="stated")
    """A setting made up for a test, such as `4`."""
'''


def with_setting(folder: Path) -> None:
    """Import `ditkit_core.execution` from a copy that has one field more."""
    found = importlib.util.find_spec("ditkit_core.execution")
    assert found is not None and found.origin is not None
    before, mark, behind = (
        Path(found.origin).read_text(encoding="utf-8").partition("\n    def __post_init__(self)")
    )
    assert mark
    copy = folder / "execution.py"
    copy.write_text(before + DECLARED + mark + behind, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ditkit_core.execution", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ditkit_core.execution"] = module
    spec.loader.exec_module(module)


def main(folder: Path) -> None:
    """Print where the setting is."""
    with_setting(folder)
    from made_profiles import made_profile

    from ditkit_core.config.help import format_help
    from ditkit_core.config.resolve import resolve
    from ditkit_core.config.resume import compare
    from ditkit_core.config.schema import config_fields, config_values, json_schema
    from ditkit_core.config.toml import read_config_file, to_toml
    from ditkit_core.execution import Execution
    from ditkit_core.planner.fit import fit
    from ditkit_core.planner.gpus import parse_gpus
    from ditkit_core.planner.search import FitTask
    from ditkit_core.run.config import RunConfig
    from ditkit_core.run.context import create_run
    from ditkit_core.run.plans.fit import apply
    from ditkit_core.run.plans.planned_step import job_of
    from ditkit_core.testing.toy import TOY, ToyArch

    file = folder / "run.toml"
    file.write_text("[train]\nhaste = 4\n", encoding="utf-8")
    config, field = resolve(RunConfig, file=file), config_fields(RunConfig)["train.haste"]
    run = create_run(TOY, config, ToyArch())
    stored = {key: value for key, value in config_values(config).items() if value is not None}
    task = FitTask(gpus=parse_gpus("80GiB"), profile_of=made_profile, execution=run.execution)
    chosen = fit(task).chosen
    assert chosen is not None
    (folder / "stored.toml").write_text(to_toml(config), encoding="utf-8")
    found = {
        "doc": field.doc,
        "resume": [
            str(change)
            for change in compare(stored, RunConfig()).stated
            if change.key == "train.haste"
        ],
        "help": "--train.haste"
        in format_help("toy-train", "", RunConfig, [], topic="train", keys={}),
        "schema": json.loads(json_schema(RunConfig, "", {}))["properties"]["train"]["properties"][
            "haste"
        ]["default"],
        "stored": read_config_file(RunConfig, folder / "stored.toml")["train.haste"],
        "run": run.execution.haste,
        "planned step": job_of(run, run.arch, config.adapter, None, "cuda").execution.haste,
        "searched": chosen.execution.haste,
        "fitted run": apply(replace(config), chosen, ("cuda:0",)).train.haste,
        "library": Execution(haste=5).haste,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

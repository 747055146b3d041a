"""A run as a list of jobs: one for each transformer, made once from the configuration."""

from pathlib import Path
from typing import Any

import pytest
from two_experts import EXPERTS, TWO

from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.jobs import jobs_of
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch

PAIR = altered(
    TOY, presets={"one": ToyArch(), "two": TWO}, experts=lambda arch: EXPERTS if arch == TWO else ()
)


def run_of(preset: str, **flags: Any) -> RunContext:
    values = {
        "model.preset": preset,
        "run.folder": "runs/cats",
        **{name.replace("__", "."): v for name, v in flags.items()},
    }
    return create_run(PAIR, resolve(RunConfig, flags=values))


def test_an_ordinary_run_is_its_only_job() -> None:
    run = run_of("one")
    jobs = jobs_of(run, "other")
    (job,) = jobs
    assert (
        job.run is jobs.run is jobs.largest is run and job.init_from == "other" and job.name == ""
    )
    assert job.folder.path == Path("runs/cats") and jobs.in_folders == () and not list(jobs.notes())
    assert jobs.named("") == job and jobs.named("high_noise") is None


def test_two_experts_are_two_jobs_with_settings_and_folders_of_their_own() -> None:
    run = run_of(
        "two",
        experts__rank=(2, 4),
        experts__steps=(10, 20),
        sample__prompts=("a",),
        prior__prompt="cat",
    )
    jobs = jobs_of(run)
    assert [job.name for job in jobs] == ["high_noise", "low_noise"] and jobs.in_folders == jobs.all
    assert [job.folder.path for job in jobs] == [
        Path("runs/cats/high_noise"),
        Path("runs/cats/low_noise"),
    ]
    assert [(job.run.config.adapter.rank, job.run.config.train.steps) for job in jobs] == [
        (2, 10),
        (4, 20),
    ]
    assert [job.run.component for job in jobs] == ["transformer", "transformer_2"]
    # The run of both generates the samples; cache and class images are shared.
    assert not any(
        job.run.config.sample.prompts for job in jobs
    ) and jobs.run.config.sample.prompts == ("a",)
    assert {job.run.data.cache.folder for job in jobs} == {run.data.cache.folder}
    assert {job.run.data.prior_folder for job in jobs} == {run.data.prior_folder}
    assert jobs.largest.expert == EXPERTS[1] and jobs.largest.config.sample.prompts == ("a",)
    assert "this plan is for low_noise" in " ".join(jobs.notes())
    # What a folder stores makes the same job again.
    (again,) = jobs_of(create_run(PAIR, jobs.all[0].settings))
    assert again.run.config == jobs.all[0].run.config and again.folder == jobs.all[0].folder


def test_a_run_of_one_expert_is_one_job_in_the_folder_of_the_run() -> None:
    jobs = jobs_of(run_of("two", experts__train="low_noise", experts__rank=(2, 4)), "other")
    (job,) = jobs
    assert (job.name, job.folder.path, job.init_from) == ("low_noise", Path("runs/cats"), "other")
    assert job.run.config.adapter.rank == 4 and jobs.run is job.run and jobs.in_folders == ()
    assert jobs.named("low_noise") == job and jobs.named("high_noise") is None


def test_a_job_starts_from_the_same_expert_of_another_run(tmp_path: Path) -> None:
    for expert in EXPERTS:
        (tmp_path / "first" / expert.name / "state" / "step-000001").mkdir(parents=True)
    starts = [job.init_from for job in jobs_of(run_of("two"), str(tmp_path / "first"))]
    assert starts == [str(tmp_path / "first" / expert.name) for expert in EXPERTS]
    (tmp_path / "first" / "low_noise").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="has no save of the low_noise expert"):
        jobs_of(run_of("two"), str(tmp_path / "first"))


def test_a_job_is_complete_at_its_own_number_of_steps(tmp_path: Path) -> None:
    high, low = jobs_of(run_of("two", run__folder=str(tmp_path / "cats"), experts__steps=(10, 20)))
    assert high.completed_step is None and high.saved_step() is None
    for job in (high, low):
        job.folder.path.mkdir(parents=True)
        job.folder.mark_complete(10)
    assert high.completed_step == 10 and low.completed_step is None, (
        "it was asked for more steps since"
    )

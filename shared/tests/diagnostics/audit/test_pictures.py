"""`--audit-precision --pictures`: one sample in several dtypes."""

import json

import pytest
import torch
from PIL import Image
from toy_world import World

from ditkit_core.diagnostics.audit import audit
from ditkit_core.testing.toy import ToySampler

SAMPLED = ("--audit-precision", "--pictures", "--sample.prompts", '["a dog"]')


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "ACTING", ("norms",))
    monkeypatch.setattr(audit, "EDGES", (0.05, 0.95))
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def test_one_sample_is_generated_in_each_choice_of_dtypes(world, capsys):
    """The toy has matmuls in bf16 as a run has them; the run's own dtypes are those of `default`."""
    assert world.train("run", 2, *SAMPLED) == 0, capsys.readouterr().err
    folder = world.folder / "run" / "audit" / "pictures"
    names = {path.stem for path in folder.glob("*.png")}
    assert names >= {"all", "fp32_this_run", "all_lowered", "fast"}
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if "/ 255" in line]
    means = {" ".join(row[:-6]): float(row[-6]) for row in rows}
    assert len(means) == len(names) - 1
    assert [mean for name, mean in means.items() if name.startswith("fp32")] == [0.0]
    assert means["all lowered"] > 0
    images = {path.stem: Image.open(path).tobytes() for path in folder.glob("*.png")}
    assert images["fp32_this_run"] != images["all_lowered"]
    page = (folder.parent / "precision.html").read_text(encoding="utf-8")
    assert page.count('<img src="data:image/jpeg;base64,') == len(means)
    assert 'href="pictures/all_lowered.png"' in page and page.count("/ 255</td>") == 2 * len(means)
    kept = json.loads((folder / "pictures.json").read_text())["pictures"]
    assert {one["name"]: round(one["mean"], 2) for one in kept} == means


def test_the_model_samples_as_before_afterwards(world, capsys, monkeypatch):
    """The picture of the run's own dtypes is bit by bit what the run samples."""
    decode, seen = ToySampler.decode, []

    def recorded(sampler: ToySampler, latents: torch.Tensor, seed: int = 0) -> torch.Tensor:
        seen.append(latents.clone())
        return decode(sampler, latents, seed)

    monkeypatch.setattr(ToySampler, "decode", recorded)
    assert world.train("run", 0, *SAMPLED, "--model.dtype", "bf16") == 0, capsys.readouterr().err
    own = seen[1]
    seen.clear()
    flags = ("--sample.prompts", '["a dog"]', "--model.dtype", "bf16")
    assert world.train("again", 0, *flags) == 0, capsys.readouterr().err
    assert torch.equal(own, seen[-1])


def test_without_a_prompt_or_an_audit_it_is_refused(world, capsys):
    assert world.train("run", 2, "--pictures") == 2
    assert "add --audit-precision" in capsys.readouterr().err
    none = ("--sample.prompts", "[]", "--sample.captions", "0")
    assert world.train("run", 2, "--audit-precision", "--pictures", *none) == 1
    assert "--pictures has nothing to sample; set sample.prompts" in capsys.readouterr().err

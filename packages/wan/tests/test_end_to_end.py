"""The demo is the real path on generated inputs: from mp4 files to an adapter that diffusers
loads."""

import re

import pytest

from ditkit_core.testing.conformance_audit import check_demo
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.demo import Demo
from ditkit_wan.spec import WAN


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo.write(WAN, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = WAN
    samples = "*.mp4"
    num_samples = range(8, 9)
    trained = "diffusion_model.blocks.0.self_attn.q.lora_A.weight"
    trained_names = r"diffusion_model\.blocks\."
    daily = slice(1, None, 2)
    default = slice(1)
    levers = (
        (
            "--data.frames",
            "1",
            "--sample.guidance",
            "1",
            "--adapter.targets",
            '["self"]',
            "--adapter.alpha",
            "3",
        ),
    )
    forms = ()
    init_from = "first.safetensors"

    @pytest.mark.exhaustive  # each change does so with an adapter of FLUX.2, in both forms
    def test_an_adapter_trained_here_starts_and_merges_into_another_run(
        self, demo, tmp_path, capsys
    ):
        super().test_an_adapter_trained_here_starts_and_merges_into_another_run(
            demo, tmp_path, capsys
        )


@pytest.mark.exhaustive
def test_the_demo_is_audited(demo, tmp_path, capsys):
    check_demo(demo, tmp_path / "run")
    # Which of them is first by a few per cent depends on the CPU.
    most = re.search(
        r"what matters most: (\w+), which this run has in fp32", capsys.readouterr().out
    )
    assert most is not None and most[1] in ("modulation", "residual")

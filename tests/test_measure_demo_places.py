"""tools/demo/place_judge.py: its judge on generated images, and one seed of what measures each demo
with it."""

from pathlib import Path

import pytest
import torch

from ditkit_core.families.demo_places import DemoImage, paint_shapes, render
from measured_demos import check_taught
from workspace import ROOT


def test_the_judge_is_right_about_generated_images_and_sees_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    from place_judge import Look, judge, prompts, row

    asked = prompts()
    assert [len(looks) for looks in asked.values()] == [4, 6]
    looks = [look for each in asked.values() for look in each]
    shown = [
        judge(torch.from_numpy(render(DemoImage(**look._asdict(), shift=(0.03, -0.02)))).float())
        for look in looks
    ]
    assert shown == looks and row(0, "all", "-", looks, shown).endswith(
        "| 10 | 100 % | 100 % | 100 % | 100 % |"
    )
    for wrong in ([(0.5, 0.5)], [(0.27, 0.27)], [(0.27, 0.5), (0.73, 0.5)]):
        assert (
            judge(torch.from_numpy(paint_shapes("circle", "red", wrong, 64, 64)).float()).position
            == ""
        )
    wanted, other = Look("red", "square", "at the top"), Look("red", "circle", "on the left")
    assert row(1, "known", "after", [wanted], [other]).endswith("| 1 | 0 % | 100 % | 0 % | 0 % |")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["flux2", "flux3", "krea2", "qwen", "qwenimage", "zimage"])
@pytest.mark.timeout(900)  # of a machine that does much else
def test_the_demo_teaches_the_new_place_and_keeps_the_known_ones(
    family: str, tmp_path: Path
) -> None:
    check_taught(["measure_demo_places.py", family], images=4, folder=tmp_path)

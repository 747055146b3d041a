"""tools/demo/measure_demo_motions.py: its judge on generated clips, and one seed of what it
measures of each demo."""

from pathlib import Path

import numpy as np
import pytest

from ditkit_core.families.demo_motions import FRAMES, SIDE, motion_caption, moving
from measured_demos import check_taught
from workspace import ROOT


def test_the_judge_is_right_about_generated_clips_and_sees_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    from measure_demo_motions import Look, judge, prompts, rates

    new, known = prompts()
    assert len({motion_caption(*look) for look in (*new, *known)}) == 8
    clips = [
        np.round(moving(*look, 3.0).paint(SIDE, SIDE, range(FRAMES))) for look in (*new, *known)
    ]
    shown = [judge(clip) for clip in clips]
    assert shown == [*new, *known]
    assert set(rates([*new, *known], shown).values()) == {1.0}
    assert (
        judge(clips[0][::-1]).direction == "up-left"
        and judge(clips[0][:1].repeat(FRAMES, axis=0)).direction == ""
    )
    assert rates([Look("red", "square", "up")], [Look("red", "circle", "up")])["all"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ltx", "wan"])
@pytest.mark.timeout(900)  # of a machine that does much else
def test_the_demo_teaches_the_new_motion_and_keeps_the_known_ones(
    family: str, tmp_path: Path
) -> None:
    check_taught(["measure_demo_motions.py", family], images=3, folder=tmp_path)

"""Sizes that tests of datasets read folders with."""

from dataclasses import replace

from ditkit_core.models.spec import DataSpec

CLIPS = DataSpec(frame_step=4, size_step=16, fps=16.0, size=(5, 16, 16))
EVERY_LENGTH = replace(CLIPS, frame_step=1, fps=8.0)
"""Clips of any number of frames."""
STILLS = replace(CLIPS, frame_step=0, fps=1.0)

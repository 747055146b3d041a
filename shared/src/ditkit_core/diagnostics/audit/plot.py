"""The picture of a precision audit: a bar for each place, on a logarithmic scale."""

import math
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ditkit_core.diagnostics.audit.findings import Findings

_WIDTH, _ROW, _BAR, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 44, 14, 170, 40, 104, 56
_INK, _GREY, _LINE = (30, 30, 30), (110, 110, 110), (215, 215, 215)
_ALONE, _BUT, _DOT = (31, 119, 180), (255, 165, 60), (20, 60, 110)


def draw(findings: Findings) -> Image.Image:
    """Errors of the gradient by place: lowered alone, with a dot for each range of noise levels, and all but it."""
    height = _TOP + _ROW * len(findings.places) + _BOTTOM
    image = Image.new("RGB", (_WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    low, high = _decades(findings)

    def at(error: float) -> float:
        share = (math.log10(error) - low) / (high - low)
        return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT)

    font, small = _font(16), _font(13)
    pen.text((16, 12), "Relative error of the gradient against fp64", fill=_INK, font=_font(20))
    _legend(pen, small, findings)
    for decade in range(low, high + 1):
        x = at(10.0**decade)
        pen.line((x, _TOP - 6, x, height - _BOTTOM), fill=_LINE)
        pen.text((x, height - _BOTTOM + 8), f"1e{decade}", fill=_GREY, font=small, anchor="ma")
    for row, each in enumerate(findings.places):
        y = _TOP + _ROW * row
        pen.text((_LEFT - 10, y + _ROW / 2), each.place, fill=_INK, font=font, anchor="rm")
        for offset, error, colour in ((6, each.alone, _ALONE), (8 + _BAR, each.all_but, _BUT)):
            if error.overall.gradient:
                pen.rectangle((_LEFT, y + offset, at(error.overall.gradient), y + offset + _BAR - 1), fill=colour)
        for found in each.alone.bins:
            if found.gradient:
                x, middle = at(found.gradient), y + 6 + _BAR / 2
                pen.ellipse((x - 3, middle - 3, x + 3, middle + 3), fill=_DOT)
    for error, dash in ((findings.own, 6), (findings.all_lowered, 2)):
        if error.overall.gradient:
            x = at(error.overall.gradient)
            for y in range(_TOP - 6, height - _BOTTOM, 2 * dash):
                pen.line((x, y, x, y + dash), fill=_INK)
    return image


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _decades(findings: Findings) -> tuple[int, int]:
    """The powers of ten between which all that is drawn lies."""
    cases = [findings.own, findings.all_lowered]
    cases += [case for each in findings.places for case in (each.alone, each.all_but)]
    errors = [error.gradient for case in cases for error in (case.overall, *case.bins)]
    known = [math.log10(error) for error in errors if 0 < error < math.inf] or [-1.0]
    low = math.floor(min(known))
    return low, max(math.ceil(max(known)), low + 1)


def _legend(pen: ImageDraw.ImageDraw, font: Any, findings: Findings) -> None:
    x, y = 16, 48
    entries = (
        (f"this place alone in {findings.lowered} (dots: by noise level)", _ALONE),
        (f"all but this place in {findings.lowered}", _BUT),
    )
    for text, colour in entries:
        pen.rectangle((x, y + 2, x + 14, y + 13), fill=colour)
        pen.text((x + 20, y), text, fill=_INK, font=font)
        x += 40 + int(pen.textlength(text, font=font))
    pen.text((16, y + 22), f"dashed: this run; dotted: all places in {findings.lowered}", fill=_INK, font=font)

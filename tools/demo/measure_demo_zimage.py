"""Measures what `zimage-train --demo` teaches: `uv run tools/demo/measure_demo_zimage.py`.

For each seed it runs the demo as it is, but with other prompts and more samples, and judges what
the run sampled before and after training. No image of the demo shows what these prompts ask for. A
sample is right in a part if `place_judge.judge` finds what the prompt says.
"""

from demo_runs import parser_of
from place_judge import measure_places


def main() -> None:
    measure_places("zimage", parser_of(str(__doc__)).parse_known_args())


if __name__ == "__main__":
    main()

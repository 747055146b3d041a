"""Measures what the demo of a family of images teaches: `uv run tools/demo/measure_demo_places.py
flux2`, or flux3, krea2, qwen, qwenimage, zimage.

For each seed it runs the demo as it is, but with other prompts and more samples, and judges what
the run sampled before and after training. No image of the demo shows what these prompts ask for. A
sample is right in a part if `place_judge.judge` finds what the prompt says.
"""

from demo_runs import parser_of
from place_judge import measure_places


def main() -> None:
    parser = parser_of(str(__doc__))
    families = ("flux2", "flux3", "krea2", "qwen", "qwenimage", "zimage")
    parser.add_argument("family", choices=families)
    options, flags = parser.parse_known_args()
    measure_places(options.family, (options, flags))


if __name__ == "__main__":
    main()

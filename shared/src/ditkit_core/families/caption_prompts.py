"""What a vision-language model is asked for, by what is to be learnt from the captions."""

from typing import Literal, get_args

CaptionGoal = Literal["scene", "character", "object", "style", "motion", "edit"]
"""`edit` is for media with references, whose caption is an instruction."""
GOALS: tuple[CaptionGoal, ...] = get_args(CaptionGoal)

_ASKED: dict[CaptionGoal, str] = {
    "scene": "Describe {media}: the subject, what it does, the place, the light and the view of the "
    "camera.",
    "character": "Describe {media}. Call the main character {name}. Describe everything but the "
    "character: clothes, pose, what is done, place, light, view of the camera. Say nothing of the "
    "character's face, hair, skin, build or age.",
    "object": "Describe {media}. Call the main object {name}. Describe where it is, what is around it, "
    "what is done with it, light and view of the camera. Say nothing of the object's own shape, "
    "colour or material.",
    "style": "Describe only the content of {media}: subjects, what they do, the place. Say nothing of "
    "how it is made: no words for style, medium, technique, palette, mood or artist.",
    "motion": "Describe {media}. Begin with the motion: what moves, in which direction and how fast, "
    "and how the camera moves. Then name subject and place in a few words.",
    "edit": "You see {media}. Write the instruction that makes the last image of what is before it, in "
    "one sentence that begins with a verb, such as: make the car blue. Say nothing of what stays as "
    "it is. Answer with the instruction alone.",
}
_NAMES: dict[CaptionGoal, str] = {
    "character": '"the person", or by its kind if it is none',
    "object": "by its kind",
}
_FORM = (
    "Write {low} to {high} words in plain English sentences, as one paragraph, without an "
    "introduction, a list or Markdown. Say only what can be seen."
)


def caption_prompt(
    goal: CaptionGoal,
    *,
    num_images: int,
    num_references: int,
    words: tuple[int, int],
    trigger: str,
    instruction: str = "",
) -> str:
    """The text that a model gets with the images of one media file.

    Args:
        num_images: Images of the file: 1, or the frames of a clip.
        num_references: Images before them that they were made of.
        words: Fewest and most words of the caption.
        trigger: Name of the character or object; empty for none.
        instruction: A person's own text instead of the goal's; `{trigger}` in it is replaced.
    """
    if instruction:
        return instruction.replace("{trigger}", trigger)
    media = (
        "this image" if num_images == 1 else f"the video that these {num_images} frames are from"
    )
    if goal == "edit":
        before = "an image" if num_references == 1 else f"{num_references} images"
        after = "an image" if num_images == 1 else f"{num_images} frames of a video"
        media = f"{before} before an edit, and then {after} after it"
    request = _ASKED[goal].format(media=media, name=trigger or _NAMES.get(goal, ""))
    low, high = words
    return request if goal == "edit" else f"{request} {_FORM.format(low=low, high=high)}"

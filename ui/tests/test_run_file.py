"""The run file stays the truth: what the command would not read is not saved, and everything else
in it stays as it was written."""

from pathlib import Path

import pytest

from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_fields, plain
from ditkit_core.errors import UserError
from ditkit_core.run.config import RunConfig
from ditkit_ui.run_file import RunFile, changed_values, checked, schema, text_of, value_of
from ditkit_ui.settings_page import help_as_html

TEXT = """# Mine.
[run]
folder = "runs/cats" # where it goes

[data]
folder = 'my cats'

[sample]
prompts = [ # two
    "a cat",
    "a \\"dog\\"", # the other
]
"""


@pytest.fixture
def file(tmp_path: Path) -> RunFile:
    path = tmp_path / "cats.toml"
    path.write_text(TEXT, encoding="utf-8")
    return RunFile(path)


def test_a_key_is_changed_in_its_place_and_comments_and_order_stay(file: RunFile) -> None:
    file.set({"run.folder": "runs/dogs", "train.steps": 7, "train.devices": ["cuda:0", "cuda:1"]})
    expected = TEXT.replace("runs/cats", "runs/dogs")
    assert file.text == expected + '\n[train]\nsteps = 7\ndevices = ["cuda:0", "cuda:1"]\n'
    assert file.path.read_text(encoding="utf-8") == file.text
    assert resolve(RunConfig, file=file.path).train.devices == ("cuda:0", "cuda:1")
    file.set({"train.steps": None, "train.devices": None, "run.folder": "runs/cats"})
    assert file.text == TEXT + "\n[train]\n"
    assert file.undo() and file.config.train.steps == 7
    assert file.undo() and file.path.read_text(encoding="utf-8") == TEXT
    assert not file.undo()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT + "[train]\nstep = 5\n", "did you mean train.steps?"),
        (TEXT + "[train]\nsteps = -5\n", "train.steps"),
        (TEXT + "[train\n", "is not TOML"),
    ],
)
def test_what_the_command_would_refuse_is_not_saved_and_has_its_message(
    file: RunFile, text: str, message: str
) -> None:
    other = file.path.with_name("other.toml")
    other.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as of_command:
        resolve(RunConfig, file=other)
    with pytest.raises(UserError, match=message) as of_page:
        file.edit(text)
    assert str(of_page.value) == str(of_command.value).replace(str(other), "cats.toml")
    assert file.path.read_text(encoding="utf-8") == TEXT
    assert file.text == text, "it stays where it can be corrected"
    file.edit(TEXT + "[train]\nsteps = 5\n")
    assert resolve(RunConfig, file=file.path).train.steps == 5


def test_a_file_that_another_program_changed_is_not_overwritten(file: RunFile) -> None:
    file.path.write_text("[train]\nsteps = 3\n", encoding="utf-8")
    with pytest.raises(UserError, match="changed by another program; load it again"):
        file.set({"train.steps": 4})
    assert file.path.read_text(encoding="utf-8") == "[train]\nsteps = 3\n"
    file.load()
    file.set({"train.steps": 4})
    assert file.path.read_text(encoding="utf-8") == "[train]\nsteps = 4\n"


def test_the_form_has_every_key_and_a_default_that_is_typed_in_changes_nothing() -> None:
    described = schema(["base"])
    fields = config_fields(RunConfig)
    assert described.keys() == fields.keys()
    assert all(entry["description"] for entry in described.values())
    assert described["model.preset"]["enum"] == ["", "base"]
    for key, field in fields.items():
        default = plain(field.default)
        if default not in (None, ""):
            assert value_of(text_of(default), described[key]) == default, key


def test_help_shows_code_as_code_and_nothing_else_as_markup() -> None:
    described = schema(["base"])
    assert any("`" in key["description"] for key in described.values())
    for name, key in described.items():
        shown, marks = help_as_html(key["description"]), key["description"].count("`")
        assert "`" not in shown and marks == 2 * shown.count("<code>"), name
    hostile = help_as_html("<b>`<i>&`")
    assert hostile == "&lt;b&gt;<code>&lt;i&gt;&amp;</code>"


def test_a_configuration_knows_what_differs() -> None:
    path = Path("a.toml")
    before = checked("", path)
    after = checked('[train]\nsteps = 5\ncheckpointing = "full"\n', path)
    defaults = before.train
    assert changed_values(before, after) == {
        "train.steps": (defaults.steps, 5),
        "train.checkpointing": (defaults.checkpointing, "full"),
    }
    assert before.run.folder == "runs/a", "as the command names it"

"""Reading, checking and printing a configuration, on a small tree and on the real one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditkit_core.commands.options import ExportOptions, SampleOptions, TrainOptions
from ditkit_core.config.cli_args import CommonOptions, read_flags
from ditkit_core.config.field import setting
from ditkit_core.config.help import format_help
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_fields, config_sections, config_values
from ditkit_core.config.toml import read_config_file, to_toml
from ditkit_core.config.validation import nearest_key
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder, RunFolderConfig
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.toy import TOY


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The `[shape]` section: a stand-in."""

    rank: int = setting(16, resume="refused")
    """Rank of the adapters,
    at least 1, 100% whole."""
    targets: tuple[str, ...] = setting((), resume="refused")
    """Names."""
    mode: Literal["lora", "full"] = setting("lora", resume="refused")
    """What is trained."""
    alpha: float | None = setting(None, resume="stated")
    """Scale."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"shape.rank = {self.rank} must be at least 1")
        if self.alpha == 13:
            raise UserError("an unlucky number")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The `[rate]` section."""

    lr: float = setting(1e-4, resume="stated")
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), resume="stated")
    """Decays."""
    log: bool = setting(False, resume="free")
    """Log it."""
    note: str = setting("", resume="free")
    """Anything."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """A small tree."""

    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    shape: Shape = Shape()
    rate: Rate = Rate()


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def flags(*argv: str) -> dict[str, Any]:
    return dict(read_flags(argv, Small, TrainOptions).values)


def refusal(act: Callable[[], Any]) -> str:
    """The message of the UserError that `act` must raise, which must be one line."""
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(write: Write) -> None:
    file = write('[shape]\nrank = 8\ntargets = ["q", "k"]\n[rate]\nlr = 1\n')
    config = resolve(Small, file=file, flags=flags("--shape.rank", "4", "--rate.log=true"))
    assert config.shape == Shape(rank=4, targets=("q", "k"))
    assert config.rate == Rate(lr=1.0, log=True) and isinstance(config.rate.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[shape]\nrnak = 3", "unknown key shape.rnak in {file}; did you mean shape.rank?"),
        ("[rate]\nrank = 3", "unknown key rate.rank in {file}; did you mean shape.rank?"),
        ("rank = 3", "unknown key rank in {file}; did you mean shape.rank?"),
        ("[shpae]\nrank = 3", "unknown section [shpae] in {file}; did you mean [shape]?"),
        ("[lora]\nrank = 3", "unknown key lora.rank in {file}; did you mean shape.rank?"),
        ("[shapes]", "unknown section [shapes] in {file}; did you mean [shape]?"),
        ("shape = 3", "shape in {file} is a section: write [shape] and its keys below it"),
        (
            "[[shape]]\nrank = 3",
            "shape in {file} is a section: write [shape] and its keys below it",
        ),
        ('[shape]\nrank = "lots"', 'shape.rank in {file} must be a whole number, not "lots"'),
        ('[shape]\nrank = "16"', 'shape.rank in {file} must be a whole number, not "16"'),
        ("[shape]\nrank = 16.0", "shape.rank in {file} must be a whole number, not 16.0"),
        ("[shape]\nrank = true", "shape.rank in {file} must be a whole number, not true"),
        ("[shape.rank]\nx = 1", 'shape.rank in {file} must be a whole number, not {{"x": 1}}'),
        (
            "[shape]\ntargets = 1",
            'shape.targets in {file} must be a list such as ["a", "b"], not 1',
        ),
        ("[rate]\nbetas = 0.9", "rate.betas in {file} must be a list such as [1, 2], not 0.9"),
        (
            "[shape]\ntargets = [1]",
            'shape.targets in {file} must be a list such as ["a", "b"], not [1]',
        ),
        ('[shape]\nmode = "lokr"', 'shape.mode in {file} must be one of lora, full, not "lokr"'),
        ('[shape]\nalpha = "x"', 'shape.alpha in {file} must be a number, not "x"'),
        ("[rate]\nlr = nan", "rate.lr in {file} must be a number, not NaN"),
        ("[rate]\nlr = inf", "rate.lr in {file} must be a number, not Infinity"),
        ('[rate]\nlog = "true"', 'rate.log in {file} must be true or false, not "true"'),
        ("[rate]\nlog = 1", "rate.log in {file} must be true or false, not 1"),
        ("[rate]\nnote = 1", "rate.note in {file} must be a string, not 1"),
        ("[rate]\nbetas = [0.9]", "rate.betas in {file} must be a list such as [1, 2], not [0.9]"),
        ("[shape]\nrank = 0", "shape.rank = 0 must be at least 1 (set in {file})"),
        ("[shape]\nalpha = 13", "shape: an unlucky number"),
        (
            '[run]\nfolder = ""',
            "run.folder is empty; set a folder, such as runs/run (set in {file})",
        ),
        (
            "[shape",
            (
                "{file} is not TOML: Expected ']' at the end of a table declaration (at end of "
                "document), which is '[shape'"
            ),
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_key_and_file(
    write: Write, text: str, message: str
) -> None:
    file = write(text)
    assert refusal(lambda: resolve(Small, file=file)) == message.format(file=file)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--shape.rnak", "3"],
            "unknown key --shape.rnak on the command line; did you mean --shape.rank?",
        ),
        (
            ["--shape.rnak=3"],
            "unknown key --shape.rnak on the command line; did you mean --shape.rank?",
        ),
        (
            ["--shape.ra", "3"],
            "unknown key --shape.ra on the command line; did you mean --shape.rank?",
        ),
        (
            ["--rate.rank", "3"],
            "unknown key --rate.rank on the command line; did you mean --shape.rank?",
        ),
        (
            ["--set", "train.steps=5"],
            (
                "unknown key --set on the command line; each key is a flag of its own, as "
                "--train.steps 5"
            ),
        ),
        (
            ["--init-form", "x"],
            "unknown key --init-form on the command line; did you mean --init-from?",
        ),
        (
            ["--shape.rank", "abc"],
            'shape.rank on the command line must be a whole number, not "abc"',
        ),
        (
            ["--shape.rank", "1.5"],
            'shape.rank on the command line must be a whole number, not "1.5"',
        ),
        (
            ["--shape.mode", "x"],
            'shape.mode on the command line must be one of lora, full, not "x"',
        ),
        (
            ["--shape.mode", "Ful"],
            'shape.mode on the command line must be one of lora, full, not "Ful"; did you mean full?',
        ),
        (["--rate.lr", "nan"], 'rate.lr on the command line must be a number, not "nan"'),
        (["--rate.lr", "high"], 'rate.lr on the command line must be a number, not "high"'),
        (
            ["--rate.betas", "1", "--rate.betas", "x"],
            "rate.betas on the command line must be a list",
        ),
        (
            ["--shape.targets", "[q"],
            'shape.targets on the command line must be a list such as ["a", "b"], not "[q"',
        ),
        (["--shape.rank"], "--shape.rank on the command line lacks its value"),
        (["--shape.rank", "--rate.lr", "1"], "--shape.rank on the command line lacks its value"),
        (["a.toml", "b.toml"], "two run files on the command line: a.toml, b.toml; give one"),
        (
            ["a.toml", "--config", "b.toml"],
            "two run files on the command line: a.toml, b.toml; give one",
        ),
        (["-x"], "unknown flag -x on the command line"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line_that_names_it(argv: list[str], message: str) -> None:
    assert refusal(lambda: flags(*argv)).startswith(message)


def test_a_section_that_refuses_a_flag_is_named_with_its_place(write: Write) -> None:
    file = write("[shape]\nrank = 4\n")
    message = refusal(lambda: resolve(Small, file=file, flags=flags("--shape.rank", "-3")))
    assert message == "shape.rank = -3 must be at least 1 (set on the command line)"


def test_a_list_is_a_repeated_flag_or_an_array_and_commas_do_not_separate() -> None:
    assert flags("--shape.targets", "q", "--shape.targets", "k,v")["shape.targets"] == ("q", "k,v")
    assert flags("--shape.targets", '["q", "k"]')["shape.targets"] == ("q", "k")
    assert flags("--shape.targets", "[]")["shape.targets"] == ()
    assert flags("--shape.targets", "1")["shape.targets"] == ("1",)
    assert flags("--rate.betas", "0.5", "--rate.betas", "0.9")["rate.betas"] == (0.5, 0.9)


def test_a_list_of_one_is_written_as_its_item_in_a_file_as_on_the_command_line(
    write: Write,
) -> None:
    assert resolve(Small, file=write('[shape]\ntargets = "q"')).shape.targets == ("q",)
    file = write("[train]\nswap_blocks = 5")
    assert read_config_file(RunConfig, file)["train.swap_blocks"] == (5,)
    assert read_flags(["--train.swap_blocks", "5"], RunConfig, TrainOptions).values[
        "train.swap_blocks"
    ] == (5,)


def test_of_a_repeated_flag_that_is_no_list_the_last_wins_and_text_stays_text() -> None:
    assert flags("--shape.rank", "1", "--shape.rank", "2") == {"shape.rank": 2}
    assert flags("--rate.note", "1e3", "--shape.alpha=-1") == {
        "rate.note": "1e3",
        "shape.alpha": -1.0,
    }
    assert flags("--rate.note=--x") == {"rate.note": "--x"}


def test_options_and_run_file_are_read_next_to_settings() -> None:
    read = read_flags(
        ["run.toml", "--demo", "--print-config", "--init-from", "runs/a"], Small, TrainOptions
    )
    assert (read.common.config, read.common.print_config, read.values) == ("run.toml", True, {})
    assert read.options == TrainOptions(demo=True, init_from="runs/a")
    read = read_flags(
        ["--prompt", "a, b", "--adapter", "x", "--prompt", "c", "--run", "r"], Small, SampleOptions
    )
    assert read.options == SampleOptions(
        prompt=("a, b", "c"), adapter="x", run=("r",)
    ) and read.common.run == ("r",)


@pytest.mark.parametrize("content", [b"\xff\xfe[\x00r\x00", "[rate]\nnote = 'ä'".encode("latin-1")])
def test_a_file_that_is_not_utf8_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    assert "is not UTF-8" in refusal(lambda: resolve(Small, file=tmp_path / "run.toml"))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[shape]\nrank = 3\n")
    assert resolve(Small, file=tmp_path / "run.toml").shape.rank == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "no.toml") in refusal(lambda: resolve(Small, file=tmp_path / "no.toml"))
    assert str(tmp_path) in refusal(lambda: resolve(Small, file=tmp_path))


def test_the_printed_configuration_carries_the_docs() -> None:
    text = to_toml(Small())
    assert "# Rank of the adapters, at least 1, 100% whole.\nrank = 16\n" in text
    assert "# Scale.\n# alpha =\n" in text
    assert "betas = [0.9, 0.999]\n" in text


number = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.builds(
        Shape,
        rank=st.integers(1, 2**62),
        targets=st.lists(st.text(), max_size=3).map(tuple),
        mode=st.sampled_from(["lora", "full"]),
        alpha=st.none() | number.filter(lambda value: value != 13),
    ),
    rate=st.builds(
        Rate, lr=number, betas=st.tuples(number, number), log=st.booleans(), note=st.text()
    ),
)
def test_what_is_printed_reads_back(
    shape: Shape, rate: Rate, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Small(shape=shape, rate=rate)
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    file.write_bytes(to_toml(config).encode())
    assert resolve(Small, file=file) == config


def test_the_demo_is_placed_in_the_run_folder_and_gives_way_to_file_and_flags(
    tmp_path: Path, write: Write
) -> None:
    demo = tmp_path / "demo.toml"
    demo.write_text(
        '[run]\nfolder = "runs/demo"\n[rate]\nnote = "{run}/in"\nlr = 2\n[shape]\ntargets = ["{run}"]\nrank = 2\n'
    )
    config = resolve(Small, demo=demo)
    assert (config.rate.note, config.shape.targets) == ("runs/demo/in", ("runs/demo",))
    file = write('[rate]\nnote = "{run}/mine"\n[run]\nfolder = "elsewhere"')
    config = resolve(Small, demo=demo, file=file, flags=flags("--shape.rank", "3"))
    assert (config.run.folder, config.rate.lr) == ("elsewhere", 2.0)
    assert config.shape == Shape(rank=3, targets=("elsewhere",))
    assert config.rate.note == "{run}/mine", "only the demo's own strings are filled in"


def test_a_stored_run_is_the_ground_and_unknown_keys_of_it_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[run]\nfolder = "moved"\n[shape]\nrank = 5\ngone = 1\n[old]\nkey = 1\n'
    )
    config = resolve(Small, stored=tmp_path, flags=flags("--rate.lr", "3"))
    assert (config.run.folder, config.shape.rank, config.rate.lr) == (str(tmp_path), 5, 3.0)
    assert "it does not exist; correct the path" in refusal(
        lambda: resolve(Small, stored=tmp_path / "none")
    )
    (tmp_path / "cats").mkdir()
    assert refusal(lambda: resolve(Small, stored=tmp_path / "cat")).endswith(
        f"did you mean {tmp_path}/cats?"
    )
    assert refusal(lambda: resolve(Small, stored=tmp_path / "cats")).endswith(
        f"no config.toml; name {tmp_path}"
    )
    other = lambda: resolve(Small, stored=tmp_path, flags=flags("--run.folder", "other"))
    assert (
        refusal(other)
        == f"--run {tmp_path} and --run.folder other name two folders; leave one of them out"
    )
    assert resolve(
        Small, stored=tmp_path, flags=flags("--run.folder", str(tmp_path))
    ).run.folder == str(tmp_path)


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """The `[shape]` section of a later version."""

    size: int = setting(16, resume="refused", formerly=("rank", "r"))
    """Rank of the adapters."""


@dataclass(frozen=True, kw_only=True)
class Later:
    """The small tree of a later version."""

    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    shape: Renamed = Renamed()


def all_help(tree: type) -> str:
    return format_help(
        "toy-train", "Train.", tree, (SampleOptions, CommonOptions), topic="all", keys={}
    )


@pytest.mark.parametrize("former", ["rank", "r"])
def test_a_renamed_key_is_read_from_a_stored_run_and_refused_elsewhere(
    tmp_path: Path, write: Write, former: str
) -> None:
    stored = tmp_path / "config.toml"
    stored.write_text(f"[shape]\n{former} = 5\n")
    assert resolve(Later, stored=tmp_path).shape.size == 5
    folder = RunFolder(tmp_path)
    (folder.state / "step-00000001").mkdir(parents=True)
    assert folder.check(Later(shape=Renamed(size=5))) == []
    with pytest.raises(UserError, match="shape.size 5 -> 6"):
        folder.check(Later(shape=Renamed(size=6)))
    stored.write_text(f"[shape]\n{former} = 5\nsize = 6\n")
    assert resolve(Later, stored=tmp_path).shape.size == 6, "today's version wrote it"
    file = write(f"[shape]\n{former} = 5\n")
    message = refusal(lambda: resolve(Later, file=file))
    assert message == f"shape.{former} in {file} is now named shape.size; rename it"
    message = refusal(lambda: read_flags([f"--shape.{former}=5"], Later, TrainOptions))
    assert message == f"--shape.{former} on the command line is now named --shape.size; rename it"
    assert f"\n{former} =" not in to_toml(Later()) and f"--shape.{former} " not in all_help(Later)


def test_a_run_that_stored_cuts_goes_on_with_them_as_split_points(tmp_path: Path) -> None:
    text = to_toml(RunConfig()).replace("\nsplit_points = []\n", "\ncuts = [3]\n")
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    config = resolve(RunConfig, stored=tmp_path)
    assert config.train.split_points == (3,)
    (tmp_path / "state" / "step-00000001").mkdir(parents=True)
    assert RunFolder(tmp_path).check(config) == [], "no change to be logged"
    message = refusal(lambda: resolve(RunConfig, file=tmp_path / "config.toml"))
    assert message.startswith("train.cuts in ") and message.endswith(
        "is now named train.split_points; rename it"
    )


def test_no_former_name_is_a_key_of_today() -> None:
    former = [
        name for described in config_fields(RunConfig).values() for name in described.formerly
    ]
    assert len(set(former)) == len(former) and not set(former) & config_fields(RunConfig).keys()


def test_the_help_names_every_key_with_its_meaning() -> None:
    text = all_help(Small)
    assert all(f"--{key} " in text for key in config_fields(Small))
    assert "Rank of the adapters, at least 1, 100% whole." in " ".join(text.split())
    assert "--adapter" in text and "--print-config" in text and "option_" not in text


@pytest.mark.parametrize(
    "text", [r'"D:\clips"', r'"D:\upload\me"', r'"D:\new\table"', r'"\\server\x"']
)
def test_a_path_of_windows_in_double_quotes_gets_its_remedy(write: Write, text: str) -> None:
    path = write(f"[data]\nfolder = {text}\n")
    message = refusal(lambda: read_config_file(RunConfig, path))
    assert (
        "write the path in single quotes, or with forward slashes" in message
        and "\n" not in message
    )
    path = write("[data]\nfolder = " + text.replace('"', "'") + "\n")
    assert read_config_file(RunConfig, path)["data.folder"] == text.strip('"')


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("adapter.rnak", "adapter.rank"),
        ("optim.rank", "adapter.rank"),
        ("train.lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("trian.steps", "train.steps"),
        ("adaptor.targets", "adapter.targets"),
        ("data.widht", "data.width"),
    ],
)
def test_the_nearest_key_of_the_real_configuration(key: str, nearest: str) -> None:
    assert nearest_key(key, config_fields(RunConfig)) == nearest


def test_every_real_key_is_explained_and_printed_so_that_it_reads_back(tmp_path: Path) -> None:
    undocumented = [key for key, field in config_fields(RunConfig).items() if not field.doc]
    assert undocumented == []
    assert {field.resume for field in config_fields(RunConfig).values()} == {
        "free",
        "stated",
        "refused",
    }
    (tmp_path / "run.toml").write_text(to_toml(RunConfig()), encoding="utf-8")
    assert resolve(RunConfig, file=tmp_path / "run.toml") == RunConfig()
    assert read_config_file(RunConfig, tmp_path / "run.toml").keys() == {
        key for key, value in config_values(RunConfig()).items() if value is not None
    }


def test_every_real_key_can_be_given_as_a_flag() -> None:
    argv, expected = [], {}
    for key, value in config_values(RunConfig()).items():
        if value is not None:
            argv.append(f"--{key}={str(value).lower() if isinstance(value, bool) else value}")
            expected[key] = tuple(value) if isinstance(value, list) else value
    assert read_flags(argv, RunConfig, TrainOptions).values == expected


def test_what_a_real_section_refuses_names_its_key() -> None:
    refused = 0
    for key, described in config_fields(RunConfig).items():
        section, name = key.split(".")
        if described.type in (int, float):
            try:
                config_sections(RunConfig)[section](**{name: described.type(-1)})
            except UserError as error:
                assert f"{section}." in str(error) and "\n" not in str(error)
                refused += 1
    assert refused > 10


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"run.folder": "~/runs/cat", "encode.cache": "~/cache", "prior.folder": "~/class"}
    config = resolve(RunConfig, flags=values)
    assert config.run_folder.path == tmp_path / "runs" / "cat"
    data = create_run(TOY, config).data
    assert (data.cache.folder, data.prior_folder) == (tmp_path / "cache", tmp_path / "class")
    beside = create_run(TOY, resolve(RunConfig, flags={"run.folder": "~/runs/cat"})).data
    assert (beside.cache.folder, beside.prior_folder.parent) == (
        tmp_path / "runs" / "cache",
        config.run_folder.path,
    )
    options = ExportOptions(push="a/b", card="~/card.md")
    assert (
        options.hub.card == str(tmp_path / "card.md")
        and ExportOptions(push="a/b", card="-").hub.card == "-"
    )

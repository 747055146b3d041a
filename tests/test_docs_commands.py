"""Every command, flag, key and piece of a run file that a page shows is accepted by the program
that it is for."""

import argparse
import importlib
import importlib.util
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from sphinx.cmd import build as sphinx_build
from torch.distributed.run import get_args_parser

from ditkit_core.commands import recipe
from ditkit_core.commands.cli import start
from ditkit_core.commands.options import OPTIONS
from ditkit_core.config.cli_args import CommonOptions, read_flags
from ditkit_core.config.foreign_words import FOREIGN_WORDS
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_fields, config_sections
from ditkit_core.config.sizes import parse_size
from ditkit_core.config.toml import read_config_file
from ditkit_core.encoding.cache import parse_rule
from ditkit_core.errors import UserError
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.run.config import RunConfig
from ditkit_ui.cli import page_parser
from pages import PAGES, blocks, code_in, prose
from workspace import MEMBERS, MODELS, ROOT, read_toml

FAMILIES = {
    family.name: family
    for family in (importlib.import_module(f"{member.package}.cli").FAMILY for member in MODELS)
}
NAMES = "|".join(FAMILIES)
LANGUAGES = {"bash", "console", "python", "text", "toml"}
PROGRAMS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:nohup |torchrun |srun |uv |uvx |pip |git |python3? |\.ci/run|"
    rf"(?:{NAMES}|zed)-(?:train|encode|sample|export|watch|caption)\b|ditkit-ui\b|(?:pytest|ruff|sphinx-build|tools/\S+\.py) )"
)
OF_A_SHELL = {"uv", "uvx", "pip", "git", "rsync", "ssh", "tmux", "docker", "sbatch", ".ci/run"}
"""Programs that a reader has without the environment of the clone; `uv run` starts all others."""
PROJECT = read_toml(ROOT / "pyproject.toml")
READ_LATER = {
    "gpus": parse_gpus,
    "host": lambda text: parse_size(text, "--host"),
    "prune_cache": parse_rule,
}
"""Options whose text the work of a command reads, and how."""

SECTIONS = "|".join(config_sections(RunConfig))
ASSIGNMENT = re.compile(rf"(?:{SECTIONS})\.\w+ = [^…]+")
ENDINGS = (".md", ".py", ".json", ".safetensors", ".toml", ".log")
"""Of files whose names look like keys: `sample.py`."""
OWN = {
    f"--{field.name.replace('_', '-')}"
    for kind in (CommonOptions, *OPTIONS.values())
    for field in fields(kind)
}
OTHERS = {
    *("--pdb", "--frozen", "--locked"),  # of pytest and uv
    *("--max-restarts", "--shutdown-timeout", "--nproc-per-node"),  # of torchrun
    # Of DiffSynth and VideoX-Fun.
    *("--dataset_base_path", "--data_file_keys", "--extra_inputs", "--train_data_meta"),
    *(f"--{word}" for word in FOREIGN_WORDS),
    *(flag for action in page_parser()._actions for flag in action.option_strings),
    *(
        flag
        for tool in ROOT.glob("tools/**/*.py")
        for flag in re.findall(r'"(--[\w-]+)"', tool.read_text(encoding="utf-8"))
    ),
}
"""Flags of other programs than the families' commands."""

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands(page: Path) -> Iterator[str]:
    """The commands of a page: lines of bash blocks, lines after `$ ` of console blocks, and code
    that begins as a command and goes on."""
    for block in blocks(page):
        for line in map(str.strip, block.text.splitlines()):
            if block.language == "bash" and line and not line.startswith("#"):
                yield line
            elif block.language == "console" and line.startswith("$ "):
                yield line.removeprefix("$ ")
    for code in code_in(prose(page)):
        if PROGRAMS.match(code) and (" " in code or code == ".ci/run"):
            yield code


def parts(line: str) -> Iterator[list[str]]:
    """The words of each program of a shell's line, without comments and the files that output goes
    to."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    for word in reader:
        if word in ("&&", "|", ";", "&"):
            yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


UNPLANNED = SimpleNamespace(
    of=lambda *rest: SimpleNamespace(devices=lambda gpus: [], host=0, hours=lambda gpus: 0.0)
)
"""A plan of every recipe, without numbers."""


class Refused(Exception):
    """What is wrong with a command."""


class Checker:
    """Holds commands against the programs that they call.

    Args:
        folder: An empty folder, for what the commands of a reader would find: his run file and his
            runs.
        capture: Returns what was printed to stderr since the last call.
        patch: pytest's monkeypatch.
    """

    def __init__(self, folder: Path, capture: Callable[[], str], patch: pytest.MonkeyPatch) -> None:
        self.capture, self.patch = capture, patch
        self.run_file, self.run = folder / "run.toml", folder / "run"
        (readme,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "toml")
        self.run_file.write_text(readme, encoding="utf-8")
        self.run.mkdir()
        (self.run / "config.toml").write_text("", encoding="utf-8")

    def check(self, words: list[str]) -> None:
        """Raise Refused if a program would not take its command, or no rule knows the program."""
        while words and (words[0] == "nohup" or re.fullmatch(r"[A-Z_]+=\S+", words[0])):
            words = words[1:]
        if ">" in words:
            words = words[: words.index(">")]
        family, _, command = words[0].partition("-")
        if family in FAMILIES and command in OPTIONS:
            self.of_family(family, command, words[1:])
        elif words[0] == "ditkit-ui":
            self.of_page(words[1:])
        elif words[0] == "srun":
            self.check(words[words.index("torchrun") :])
        elif words[0] == "torchrun":
            self.of_torchrun(words[1:])
        elif words[:2] == ["uv", "run"]:
            if rest := self.without_options_of_uv(words[2:]):  # else it names `uv run` itself
                self.check(rest)
        elif words[0] == "python":
            self.check(words[1:])
        elif words[0].startswith("tools/"):
            self.of_tool(words[0], words[1:])
        elif words[0] == "pytest":
            self.of_pytest(words[1:])
        elif words[0] == "sphinx-build":
            expect(
                Path(sphinx_build.get_parser().parse_args(words[1:]).confdir, "conf.py").is_file(),
                "finds no conf.py",
            )
        elif words[0] == ".ci/run":
            expect(
                os.access(ROOT / ".ci/run", os.X_OK) and not words[1:],
                "is no program without arguments",
            )
        else:
            expect(any(re.fullmatch(form, shlex.join(words)) for form in FORMS), "no rule knows it")
            self.names(words)

    def of_family(self, family: str, command: str, argv: list[str]) -> None:
        """As the command reads it, with a run file and runs of our own for those that a reader
        has."""
        argv = [str(self.run_file) if word == "run.toml" else word for word in argv]
        for at, word in enumerate(argv[:-1]):
            if word in ("--run", "--init-from"):
                expect(
                    re.fullmatch(r"RUN|runs/[\w/]+", argv[at + 1]),
                    f"{argv[at + 1]} is no run's folder",
                )
                argv[at + 1] = str(self.run)
        expect(argv, "starts nothing")
        read = read_flags(argv, RunConfig, OPTIONS[command]).options
        if getattr(read, "comfyui", ""):  # a reader has its files
            at = argv.index("--comfyui")
            argv = argv[:at] + argv[at + 2 :]
        with self.patch.context() as patch:
            # A list of recipes plans them, in seconds each: commands/test_recipe.py and
            # test_recipes.py look at the numbers.
            patch.setattr(recipe, "PlannedRun", UNPLANNED)
            status = start(FAMILIES[family], command, [*argv, "--print-config"])
        printed = self.capture()
        expect(status == 0, printed.strip())
        for option, parse in READ_LATER.items():
            if text := getattr(read, option, ""):
                parse(text)

    def of_page(self, argv: list[str]) -> None:
        """By the page's own parser."""
        try:
            page_parser().parse_args(argv)
        except SystemExit as stopped:
            raise Refused(self.capture().strip()) from stopped

    def of_torchrun(self, words: list[str]) -> None:
        """By torchrun's own parser, and then the module's command."""
        try:
            given = get_args_parser().parse_args([re.sub(r"^\$\w+$", "2", word) for word in words])
        except SystemExit as stopped:
            raise Refused(self.capture().strip()) from stopped
        expect(
            given.module and re.fullmatch(r"ditkit_\w+\.train", given.training_script),
            "starts no module of ours",
        )
        assert importlib.util.find_spec(given.training_script)
        self.of_family(
            given.training_script.split(".")[0].removeprefix("ditkit_"),
            "train",
            given.training_script_args,
        )

    def without_options_of_uv(self, words: list[str]) -> list[str]:
        """What `uv run` runs."""
        while words and words[0].startswith("--"):
            takes = {
                "--isolated": 1,
                "--no-sync": 1,
                "--package": 2,
                "--group": 2,
                "--extra": 2,
            }.get(words[0], 0)
            expect(takes, f"uv run has no option {words[0]}")
            self.names(words[:takes])
            words = words[takes:]
        return words

    def of_tool(self, path: str, argv: list[str]) -> None:
        """By the tool's own parser, which ends it; a tool without a parser takes no arguments."""
        expect((ROOT / path).is_file(), "there is no such tool")
        tool = importlib.import_module(Path(path).stem)
        if not re.search(r"parse_(known_)?args", (ROOT / path).read_text(encoding="utf-8")):
            expect(not argv, "takes no arguments")
            return

        def stop_after(name):
            def parse(parser, args=None, namespace=None):
                patch.undo()
                getattr(parser, name)(argv if args is None else args, namespace)
                raise KeyboardInterrupt

            return parse

        with self.patch.context() as patch:
            for name in ("parse_args", "parse_known_args"):
                patch.setattr(argparse.ArgumentParser, name, stop_after(name))
            patch.setattr("sys.argv", [path, *argv])
            try:
                tool.main()
            except KeyboardInterrupt:
                return
            except SystemExit as stopped:
                raise Refused(self.capture().strip()) from stopped
        raise Refused("the tool read no arguments")

    def of_pytest(self, argv: list[str]) -> None:
        known = {
            marker.partition(":")[0]
            for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
        }
        rest = iter(argv)
        for word in rest:
            if word == "-m":
                named = set(re.findall(r"\w+", next(rest))) - {"not", "and", "or"}
                expect(named <= known, f"there are no markers {named - known}")
            elif word == "-n":
                expect(next(rest).isdecimal(), "-n takes a number")
            else:
                expect(
                    word == "packages/zed/tests" or (ROOT / word).exists(),
                    f"{word} is neither a path nor one of the options -m and -n",
                )

    def names(self, words: list[str]) -> None:
        """Members, extras and groups after their options exist."""
        following = dict(itertools.pairwise(words))
        extras = {
            extra for member in MEMBERS for extra in member.project.get("optional-dependencies", ())
        }
        for option, known in {
            "--package": {member.name for member in MEMBERS},
            "--extra": extras,
            "--group": PROJECT["dependency-groups"].keys(),
        }.items():
            expect(
                following.get(option) in {None, *known},
                f"there is no {option} {following.get(option)}",
            )


def expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)


FORMS = (
    r"uv sync(?: --package ditkit-\w+)?(?: --extra [\w-]+)?(?: --group \w+)?",
    r"uv lock(?: --upgrade-package NAME)?",
    # of the package that a reader of docs/adding_a_model.md makes
    r"zed-train (?:--demo|--print-schema)",
    rf"uv tool install 'git\+URL#subdirectory=packages/(?:{NAMES})'",
    r"uv pip install (?:pillow-heif|wheels/\*\.whl|'wheels/\*\.whl')",
    r"uv build --wheel --package ditkit-\w+ -o wheels",
    r"pip install (?:\./shared )?\./packages/\w+",
    r"uvx --from \./packages/\w+ \w+-train --help",
    r"pip install uv",
    r"rsync -a (?:--[\w=]+ )*(?:state -e 'ssh -p PORT' )?[\w./:@ ]+",
    r"docker build -t ditkit \.",
    (
        r"docker run --rm -it --gpus all --shm-size 8g -v '?\$PWD:/workspace'? ditkit wan-train "
        r"run\.toml"
    ),
    r"tmux new -s train",
    r"sbatch (?:--dependency=afterany:JOB )?tools/job\.slurm run\.toml",
    r"ssh -p PORT root@HOST",
    r"ssh (?:-p PORT )?-N -L (\d+):127\.0\.0\.1:\1 (?:root|USER)@(?:HOST|NODE|IP)",
    r"git (?:status|diff)",
    r"git add(?: uv\.lock)?",
    r"git ls-files '\*NAME'",
    r"ruff (?:format|check)(?: --fix)?",
)
"""What pages say to uv, pip, ssh, git and ruff."""


@by_page
def test_every_command_of_a_page_is_accepted(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    checker = Checker(tmp_path, lambda: capsys.readouterr().err, monkeypatch)
    refused = []
    for line in commands(page):
        try:
            for words in parts(line):
                checker.check(words)
        except (Refused, UserError) as error:
            refused.append(f"{line}: {error}")
    assert refused == []


def needs_environment(words: list[str]) -> bool:
    """Whether a command names a program of the clone's environment without `uv run`."""
    plain = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S+|nohup", word)]
    return "uv" not in plain if plain[0] == "srun" else plain[0] not in OF_A_SHELL


def test_every_command_of_a_page_starts_in_a_fresh_clone():
    """Where no environment is activated: a command that is typed as it stands is found."""
    assert [
        (str(page.relative_to(ROOT)), line)
        for page in PAGES
        for line in commands(page)
        if any(needs_environment(words) for words in parts(line))
    ] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("wan-train run.toml", True),
        ("uv run wan-train run.toml", False),
        ("CUDA_VISIBLE_DEVICES=1 wan-encode run.toml", True),
        ("srun --ntasks 2 torchrun -m ditkit_wan.train run.toml", True),
        ("nohup uv run torchrun -m ditkit_wan.train run.toml", False),
        ("pip install uv && wan-train --demo", True),
        ("tools/docs/doc_tables.py --check", True),
    ],
)
def test_a_command_that_needs_the_environment_is_found(line, expected):
    assert any(needs_environment(words) for words in parts(line)) is expected


@by_page
def test_every_block_of_a_page_says_its_language_and_hides_no_command(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, (
            f"line {block.line}: begin the block with one of {sorted(LANGUAGES)}"
        )
        if block.language == "text":
            assert not [
                line
                for line in block.text.splitlines()
                if PROGRAMS.match(line.strip().removeprefix("$ "))
            ]
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")


@by_page
def test_every_piece_of_a_run_file_that_a_page_shows_is_read(page, tmp_path):
    file = tmp_path / "run.toml"
    for block in blocks(page):
        if block.language == "toml":
            file.write_text(block.text, encoding="utf-8")
            resolve(RunConfig, file=file)
    for code in code_in(prose(page)):
        if ASSIGNMENT.fullmatch(code):  # of a sentence, which may name what it needs elsewhere
            file.write_text(code, encoding="utf-8")
            read_config_file(RunConfig, file)


@by_page
def test_every_key_and_every_flag_that_a_page_names_exists(page):
    text = prose(page)
    named = set(re.findall(rf"(?:`|--)((?:{SECTIONS})\.[a-z_]+)(?=[` =])", text))
    assert {key for key in named if not key.endswith(ENDINGS)} <= config_fields(RunConfig).keys()
    assert len(named) > 10 or page.name != "troubleshooting.md" and page.parent.name != "recipes"
    flags = {
        word.partition("=")[0]
        for code in code_in(text)
        if code.startswith("--")
        for word in code.split()
    }
    assert {flag for flag in flags if flag.startswith("--") and "." not in flag} <= OWN | OTHERS


def test_the_pages_show_what_these_tests_look_for():
    texts = [prose(page) for page in PAGES]
    assert sum(len(list(commands(page))) for page in PAGES) > 120
    assert sum(block.language == "toml" for page in PAGES for block in blocks(page)) > 6
    assert sum(bool(ASSIGNMENT.fullmatch(code)) for text in texts for code in code_in(text)) > 10


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("uv run wan-train run.toml --train.stepz 3", "did you mean --train.steps?"),
        ("wan-train run.toml --train.steps many", "must be a whole number"),
        ("wan-train mine.toml", "cannot read the run file mine.toml"),
        ("wan-train run.toml --gpus 24GiB", "add --plan or --fit"),
        ("wan-train run.toml --plan --gpus gtx1", "is not known; write its memory"),
        ("wan-train run.toml --plan --gpus 24GiB --host lots", "--host"),
        ("flux2-encode run.toml --prune-cache old", "is not a rule"),
        ("wan-sample --run elsewhere", "elsewhere is no run's folder"),
        ("wan-export", "starts nothing"),
        ("pip install uv && uv run wan-train --demmo", "did you mean --demo?"),
        ("uv run tools/docs/doc_tables.py --only nothing", "invalid choice: 'nothing'"),
        ("uv run tools/bench/plan_published.py --fast", "takes no arguments"),
        ("uv run tools/gone.py", "there is no such tool"),
        ("uv run pytest -m slwo", "there are no markers {'slwo'}"),
        ("uv run pytest shared/tests/gone.py", "neither a path"),
        ("uv run --package ditkit-sana pytest", "there is no --package ditkit-sana"),
        ("uv run --no-snyc pytest", "uv run has no option --no-snyc"),
        ("uv sync --extra sana", "there is no --extra sana"),
        ("rm -r runs", "no rule knows it"),
        ("git push", "no rule knows it"),
    ],
)
def test_a_command_that_would_fail_is_refused(line, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    checker = Checker(tmp_path, lambda: capsys.readouterr().err, monkeypatch)
    with pytest.raises((Refused, UserError), match=re.escape(why)):
        for words in parts(line):
            checker.check(words)

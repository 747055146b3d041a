"""Parts of a model: found here, fetched from the hub, or refused in one line."""

from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.run.prepare import arch_here
from ditkit_core.testing.toy import TOY

HUB = "huggingface_hub.snapshot_download"
PAGE = "https://huggingface.co/owner/model"


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_part_is_below_the_base(tmp_path):
    (tmp_path / "vae").mkdir()
    assert ModelPaths(base=str(tmp_path)).locate("vae") == tmp_path / "vae"


def test_a_part_of_its_own_path_is_taken_from_there(tmp_path):
    (tmp_path / "base" / "vae").mkdir(parents=True)
    file = tmp_path / "vae.safetensors"
    file.touch()
    components = ModelPaths(base=str(tmp_path / "base"), vae=str(file))
    assert components.locate("vae") == file


def test_a_part_without_a_key_of_its_own_comes_from_the_base(tmp_path):
    (tmp_path / "scheduler").mkdir()
    assert ModelPaths(base=str(tmp_path), vae="x").locate("scheduler") == tmp_path / "scheduler"


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "tokenizer", "image_encoder"])
def test_a_part_that_nothing_names_is_an_error_that_names_the_key(part):
    with pytest.raises(UserError, match=f"set model.{part} ") as error:
        ModelPaths().locate(part)
    one_line(error)


def test_a_base_without_the_part_names_both_keys(tmp_path):
    with pytest.raises(UserError) as error:
        ModelPaths(base=str(tmp_path)).locate("vae")
    message = one_line(error)
    assert "model.base" in message
    assert "contains no vae; set model.vae" in message


@pytest.mark.parametrize("value", ["/no/such/place", "nowhere", "./a/b", "C:\\models\\wan", "a//b"])
def test_a_path_that_is_not_there_is_named(value, monkeypatch):
    monkeypatch.setattr(HUB, lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="no such file or folder") as error:
        ModelPaths(vae=value).locate("vae")
    assert "model.vae" in one_line(error)


@pytest.mark.parametrize("suffix", [".pth", ".bin", ".pt", ".ckpt", ".PTH"])
def test_a_pickle_is_refused_with_the_reason_and_what_to_get_instead(tmp_path, suffix):
    file = tmp_path / f"their_vae{suffix}"
    file.touch()
    with pytest.raises(UserError, match="runs the code in it; get vae.safetensors instead") as error:
        ModelPaths(vae=str(file)).locate("vae", safe_names={file.name: "vae.safetensors"})
    one_line(error)
    with pytest.raises(UserError, match=r"get the same weights as .safetensors instead of their_vae"):
        ModelPaths(vae=str(file)).locate("vae")


def test_a_folder_of_pickles_alone_is_refused_and_one_with_safe_weights_is_not(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match="is a pickle"):
        ModelPaths(text_encoder=str(tmp_path)).locate("text_encoder")
    (tmp_path / "model.safetensors").touch()
    assert ModelPaths(text_encoder=str(tmp_path)).locate("text_encoder") == tmp_path


def test_the_commands_that_fetch_are_named_repository_by_repository():
    elsewhere = ModelPaths(base="owner/model/wan", vae="owner/vae/wan/vae.safetensors", text_encoder="other/texts/umt5")
    assert elsewhere.fetch_commands(["transformer", "tokenizer", "vae", "text_encoder"]) == (
        'hf download owner/model --include "wan/model_index.json" --include "wan/transformer/*" --include "wan/tokenizer/*" && '
        'hf download owner/vae --include "wan/vae.safetensors" && hf download other/texts --include "umt5/*"'
    )
    alone = ModelPaths(base="owner/model", vae="owner/model")
    assert alone.fetch_commands(["vae"]) == 'hf download owner/model --include "*"'


class Hub:
    """A hub of some files: makes those that the patterns of a call allow."""

    def __init__(self, folder, files):
        self.folder, self.files, self.calls = folder, files, []

    def __call__(self, repository, *, allow_patterns, ignore_patterns):
        from huggingface_hub.utils import filter_repo_objects

        self.calls.append(repository)
        for name in filter_repo_objects(self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        return str(self.folder)

    def fetched(self):
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}


FILES = [
    "model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors", "vae/pytorch_model.bin", "vae/run.py",
    "transformer/config.json", "transformer/a-00001-of-00002.safetensors", "tokenizer/spiece.model", "tokenizer/deep/x.json",
]  # fmt: skip


def test_a_base_on_the_hub_gives_that_part_alone_and_no_code(tmp_path, monkeypatch):
    hub = Hub(tmp_path, FILES)
    monkeypatch.setattr(HUB, hub)
    assert ModelPaths(base="owner/model").locate("vae") == tmp_path / "vae"
    assert hub.fetched() == {"model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
    assert hub.calls == ["owner/model"]
    ModelPaths(base="owner/model").locate("tokenizer")
    assert "tokenizer/spiece.model" in hub.fetched()


@pytest.mark.parametrize(
    ("value", "files", "expected", "fetched"),
    [
        ("owner/model", ["vae/a.safetensors", "b.safetensors"], "vae", {"vae/a.safetensors"}),
        ("owner/model", ["b.safetensors", "c.pth", "other/a.safetensors"], "", {"b.safetensors"}),
        ("owner/model/inner", ["inner/a.safetensors", "b.safetensors"], "inner", {"inner/a.safetensors"}),
        (
            "owner/m/in/f.safetensors",
            ["in/f.safetensors", "in/g.safetensors"],
            "in/f.safetensors",
            {"in/f.safetensors"},
        ),
    ],
)
def test_a_hub_id_of_a_part_may_name_a_folder_or_file_inside(tmp_path, monkeypatch, value, files, expected, fetched):
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(HUB, hub)
    assert ModelPaths(vae=value).locate("vae") == tmp_path / expected
    assert hub.fetched() == fetched


def test_a_base_inside_a_repository_brings_its_own_index(tmp_path, monkeypatch):
    files = ["model_index.json", "inner/model_index.json", "inner/transformer/config.json", "inner/vae/config.json"]
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(HUB, hub)
    assert ModelPaths(base="owner/model/inner").locate("transformer") == tmp_path / "inner" / "transformer"
    assert hub.fetched() == {"inner/model_index.json", "inner/transformer/config.json"}


def test_a_folder_that_is_here_is_never_asked_for_on_the_hub(tmp_path, monkeypatch):
    """Its path, two names with a slash, is one that a hub could have: a base with the parts of a model, whose transformer lies elsewhere."""
    asked = []
    monkeypatch.setattr(HUB, lambda *args, **kwargs: asked.append(args))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "wan" / "vae").mkdir(parents=True)
    assert ModelPaths(base="mine/wan").fetched_description("transformer") is None
    with pytest.raises(
        UserError, match="'mine/wan' contains no transformer to say .*; set model.transformer to its file"
    ):
        arch_here(TOY, ModelPaths(base="mine/wan"), fetch=True)
    assert not asked


def test_a_part_that_the_hub_does_not_have_names_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(HUB, Hub(tmp_path, FILES))
    with pytest.raises(UserError, match="contains no text_encoder; set model.text_encoder"):
        ModelPaths(base="owner/model").locate("text_encoder")


def response(status: int) -> SimpleNamespace:
    """What the hub's errors look at, without the HTTP library that its client happens to use."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            errors.GatedRepoError("x\ny", response=response(403)),
            f"is gated: accept its licence on {PAGE}, then log in with `hf auth login`",
        ),
        (
            errors.RepositoryNotFoundError("x\ny", response=response(404)),
            f"no such model on the hub or no right to read it; check the path, or open {PAGE} and log in with `hf auth login`",
        ),
        (errors.LocalEntryNotFoundError("x\ny"), "the hub cannot be reached; go online once"),
        (errors.OfflineModeIsEnabled("x\ny"), "the hub cannot be reached; go online once"),
        (
            errors.HfHubHTTPError("x\ny", response=response(401)),
            f"the hub answered 401; accept its licence on {PAGE} if it has one, then log in with `hf auth login`",
        ),
        (errors.HfHubHTTPError("x\ny", response=response(503)), "the hub answered 503; try again later"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_refuses_is_said_in_one_line_with_the_key(monkeypatch, raised, said):
    def refuse(*args, **kwargs):
        raise raised

    monkeypatch.setattr(HUB, refuse)
    with pytest.raises(UserError) as error:
        ModelPaths(base="owner/model").locate("vae")
    message = one_line(error)
    assert said in message
    assert "model.base" in message


@pytest.mark.parametrize("value", ["~nobody-here/model", "~nobody\0/model", "a\0b", "x" * 5000])
def test_a_path_that_no_system_has_is_one_line(value: str) -> None:
    for model in (ModelPaths(base=value), ModelPaths(vae=value)):
        with pytest.raises(UserError, match=r"model\.|no preset|cannot be read"):
            model.locate("vae")

"""Parts of a model: found here, fetched from the hub, or refused in one line."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from ditkit_core.errors import UserError
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.paths import ModelPaths, check_preset, is_hub_id
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


@pytest.mark.parametrize(
    "part", ["transformer", "vae", "text_encoder", "tokenizer", "image_encoder"]
)
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


def test_a_typing_error_in_a_local_path_is_answered_with_the_path_and_the_hub_is_not_asked(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HUB, lambda *args, **kwargs: pytest.fail("asked the hub"))
    (tmp_path / "runs/demo/inputs/checkpoint").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/wan.safetensors").touch()
    for value, meant in (
        ("runs/demo/inputs/checkpointt", "runs/demo/inputs/checkpoint"),
        ("models/wann.safetensors", "models/wan.safetensors"),
        ("model/wan.safetensors", "models/wan.safetensors"),
    ):
        assert not is_hub_id(value)
        for paths, part in (
            (ModelPaths(base=value), "transformer"),
            (ModelPaths(transformer=value), "transformer"),
        ):
            with pytest.raises(UserError) as error:
                paths.locate(part)
            assert one_line(error).endswith(
                f"it is not a hub id (owner/name); did you mean {meant}?"
            )
            assert f"did you mean {meant}? Or set " in paths.not_described() + " "


@pytest.mark.parametrize(
    "value",
    [
        "owner/model",
        "owner/model/split_files/vae/vae.safetensors",
        "black-forest-labs/FLUX.2-klein-4B",
    ],
)
def test_a_hub_id_stays_one_next_to_a_folder_with_its_owners_name(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / value.partition("/")[0]).mkdir()
    assert is_hub_id(value)


def test_what_is_on_no_hub_says_which_local_path_is_near(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/wan-1.3b").mkdir(parents=True)
    for raised in (
        errors.LocalEntryNotFoundError("x"),
        errors.RepositoryNotFoundError("x", response=response(404)),
    ):
        monkeypatch.setattr(
            HUB, lambda *args, raised=raised, **kwargs: (_ for _ in ()).throw(raised)
        )
        with pytest.raises(
            UserError,
            match=r"'models/wan-1.3': no such folder here \(did you mean models/wan-1.3b\?\), and no such model",
        ):
            ModelPaths(base="models/wan-1.3").locate("vae")


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("https://huggingface.co/owner/model", "is an address; write the hub id owner/model"),
        ("huggingface.co/owner/model/tree/main", "is an address; write the hub id owner/model"),
        ("https://hf.co/owner/model/blob/main/a/b.safetensors", "is an address; write the hub id owner/model/a/b.safetensors"),
        ("https://huggingface.co/owner/model/resolve/main/b.safetensors?download=true", "write the hub id owner/model/b.safetensors"),
        ("https://example.org/b.safetensors", "is an address; download it, and name the file"),
        ("C:\\models\\wan", "it is a path of Windows; write its path on this machine"),
    ],
)  # fmt: skip
def test_an_address_is_answered_with_the_hub_id(value, answer):
    with pytest.raises(UserError) as error:
        ModelPaths(transformer=value).locate("transformer")
    assert one_line(error).endswith(answer)


@pytest.mark.parametrize(
    ("preset", "near"),
    [
        ("wan_t2v_14B", "t2v-14b"),
        ("t2v1.3b", "t2v-1.3b"),
        ("flux2-klein-4b", "klein-4b"),
        ("hunyuan", ""),
    ],
)
def test_an_unknown_preset_is_answered_with_the_nearest(preset, near):
    with pytest.raises(UserError) as error:
        check_preset(preset, ["t2v-1.3b", "t2v-14b", "klein-4b"])
    wanted = f"did you mean {near}? Choose one of" if near else "choose one of"
    assert (
        one_line(error)
        == f"model.preset = {preset!r} is unknown; {wanted} t2v-1.3b, t2v-14b, klein-4b"
    )


def test_an_unknown_hub_id_is_answered_with_the_nearest_published_one(monkeypatch):
    spec = replace(
        TOY,
        architecture=replace(
            TOY.architecture, hub_presets={"Some-Owner/Toy2.1-T2V-1B-Diffusers": "tiny"}
        ),
    )
    monkeypatch.setattr(
        HUB, lambda *args, **kwargs: (_ for _ in ()).throw(errors.LocalEntryNotFoundError("x"))
    )
    for base in ("Some-Owner/Toy2.1-T2V-1B", "some-owner/toy2.1-t2v-1b-diffusers"):
        for fetch in (False, True):
            with pytest.raises(
                UserError, match=r"; did you mean Some-Owner/Toy2.1-T2V-1B-Diffusers\?$"
            ):
                arch_here(spec, ModelPaths(base=base), fetch=fetch)
    with pytest.raises(UserError) as error:
        arch_here(spec, ModelPaths(base="other/thing"))
    assert "did you mean" not in one_line(error)
    for inner in ("", "/transformer", "/high_noise_model/weights.safetensors"):
        assert (
            arch_here(spec, ModelPaths(transformer=f"Some-Owner/Toy2.1-T2V-1B-Diffusers{inner}"))[0]
            == "tiny"
        )
    assert arch_here(spec, ModelPaths(base="Some-Owner/Toy2.1-T2V-1B-Diffusers"))[0] == "tiny"


@pytest.mark.parametrize("suffix", [".pth", ".bin", ".pt", ".ckpt", ".PTH"])
def test_a_pickle_is_refused_with_the_reason_and_what_to_get_instead(tmp_path, suffix):
    file = tmp_path / f"their_vae{suffix}"
    file.touch()
    with pytest.raises(
        UserError, match="runs the code in it; get vae.safetensors instead"
    ) as error:
        ModelPaths(vae=str(file)).locate("vae", safe_names={file.name: "vae.safetensors"})
    one_line(error)
    with pytest.raises(
        UserError, match=r"get the same weights as .safetensors instead of their_vae"
    ):
        ModelPaths(vae=str(file)).locate("vae")


def test_a_folder_of_pickles_alone_is_refused_and_one_with_safe_weights_is_not(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match="is a pickle"):
        ModelPaths(text_encoder=str(tmp_path)).locate("text_encoder")
    (tmp_path / "model.safetensors").touch()
    assert ModelPaths(text_encoder=str(tmp_path)).locate("text_encoder") == tmp_path


def test_the_commands_that_fetch_are_named_repository_by_repository():
    elsewhere = ModelPaths(
        base="owner/model/wan", vae="owner/vae/wan/vae.safetensors", text_encoder="other/texts/umt5"
    )
    assert elsewhere.fetch_commands(["transformer", "tokenizer", "vae", "text_encoder"]) == (
        'hf download owner/model --include "wan/model_index.json" --include "wan/transformer/*" --include "wan/tokenizer/*" --include "wan/processor/*" && '
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
        for name in filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        return str(self.folder)

    def fetched(self):
        return {
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if path.is_file()
        }


FILES = [
    "model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
    "vae/pytorch_model.bin", "vae/run.py",
    "transformer/config.json", "transformer/a-00001-of-00002.safetensors", "tokenizer/spiece.model",
    "tokenizer/deep/x.json",
]  # fmt: skip


def test_a_base_on_the_hub_gives_that_part_alone_and_no_code(tmp_path, monkeypatch):
    hub = Hub(tmp_path, FILES)
    monkeypatch.setattr(HUB, hub)
    assert ModelPaths(base="owner/model").locate("vae") == tmp_path / "vae"
    assert hub.fetched() == {
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }
    assert hub.calls == ["owner/model"]
    ModelPaths(base="owner/model").locate("tokenizer")
    assert "tokenizer/spiece.model" in hub.fetched()


@pytest.mark.parametrize(
    ("value", "files", "expected", "fetched"),
    [
        ("owner/model", ["vae/a.safetensors", "b.safetensors"], "vae", {"vae/a.safetensors"}),
        ("owner/model", ["b.safetensors", "c.pth", "other/a.safetensors"], "", {"b.safetensors"}),
        (
            "owner/model/inner",
            ["inner/a.safetensors", "b.safetensors"],
            "inner",
            {"inner/a.safetensors"},
        ),
        (
            "owner/m/in/f.safetensors",
            ["in/f.safetensors", "in/g.safetensors"],
            "in/f.safetensors",
            {"in/f.safetensors"},
        ),
    ],
)
def test_a_hub_id_of_a_part_may_name_a_folder_or_file_inside(
    tmp_path, monkeypatch, value, files, expected, fetched
):
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(HUB, hub)
    assert ModelPaths(vae=value).locate("vae") == tmp_path / expected
    assert hub.fetched() == fetched


def test_a_base_inside_a_repository_brings_its_own_index(tmp_path, monkeypatch):
    files = [
        "model_index.json",
        "inner/model_index.json",
        "inner/transformer/config.json",
        "inner/vae/config.json",
    ]
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(HUB, hub)
    assert (
        ModelPaths(base="owner/model/inner").locate("transformer")
        == tmp_path / "inner" / "transformer"
    )
    assert hub.fetched() == {"inner/model_index.json", "inner/transformer/config.json"}


@pytest.mark.parametrize("inner", ["", "inner/"])
def test_a_tokenizer_may_be_the_processors(tmp_path, monkeypatch, inner):
    """On the hub and here, and only where there is no folder of its own name."""
    hub = Hub(tmp_path, [f"{inner}processor/tokenizer.json", f"{inner}vae/config.json"])
    monkeypatch.setattr(HUB, hub)
    base = tmp_path / inner
    elsewhere = ModelPaths(base=f"owner/model/{inner}".rstrip("/"))
    assert elsewhere.locate("tokenizer") == base / "processor"
    here = ModelPaths(base=str(base))
    assert here.locate("tokenizer") == here.here("tokenizer") == base / "processor"
    with pytest.raises(UserError, match="contains no scheduler"):
        here.locate("scheduler")
    (base / "tokenizer").mkdir()
    assert here.locate("tokenizer") == here.here("tokenizer") == base / "tokenizer"


def test_a_folder_that_is_here_is_never_asked_for_on_the_hub(tmp_path, monkeypatch):
    """Its path, two names with a slash, is one that a hub could have: a base with the parts of a
    model, whose transformer lies elsewhere."""
    asked = []
    monkeypatch.setattr(HUB, lambda *args, **kwargs: asked.append(args))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "wan" / "vae").mkdir(parents=True)
    assert ModelPaths(base="mine/wan").fetched_description("transformer") is None
    with pytest.raises(
        UserError,
        match="'mine/wan' contains no transformer to say .*; set model.transformer to its file",
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
            (
                f"no such model on the hub or no right to read it; check the path, or open {PAGE} and "
                f"log in with `hf auth login`"
            ),
        ),
        (
            errors.LocalEntryNotFoundError("x\ny"),
            "the hub, which cannot be reached; correct the path, or go online once",
        ),
        (
            errors.OfflineModeIsEnabled("x\ny"),
            "the hub, which cannot be reached; correct the path, or go online once",
        ),
        (
            errors.HfHubHTTPError("x\ny", response=response(401)),
            (
                f"the hub answered 401; accept its licence on {PAGE} if it has one, then log in with "
                f"`hf auth login`"
            ),
        ),
        (
            errors.HfHubHTTPError("x\ny", response=response(503)),
            "the hub answered 503; try again later",
        ),
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


def cached(folder: Path, *hashes: str) -> Path:
    """A repository in the hub's cache, with snapshots that have a transformer and a VAE."""
    repository = folder / "hub" / "models--owner--name"
    for name in hashes:
        for part in ("transformer", "vae"):
            (repository / "snapshots" / name / part).mkdir(parents=True)
    return repository


@pytest.mark.parametrize("inner", ["", "snapshots", "snapshots/b"])
def test_a_repository_in_the_hub_s_cache_is_its_snapshot(tmp_path: Path, inner: str) -> None:
    one = cached(tmp_path / "one", "b")
    two = cached(tmp_path / "two", "a", "b", "c")
    (two / "refs").mkdir()
    (two / "refs" / "main").write_text("b")
    for repository in (one, two):
        paths = ModelPaths(base=str(repository / inner))
        assert paths.locate("vae") == paths.here("vae") == repository / "snapshots" / "b" / "vae"
        assert not paths.is_elsewhere("vae")


def test_what_is_no_base_is_said_with_what_to_name(tmp_path: Path) -> None:
    several, (file, folder) = (
        cached(tmp_path, "a", "b"),
        (tmp_path / "wan.safetensors", tmp_path / "wan"),
    )
    file.write_bytes(b"x")
    folder.mkdir()
    (folder / "wan.safetensors").write_bytes(b"x")
    for base, said in (
        (several, "without one snapshot to take; name a folder in its snapshots"),
        (several / "snapshots", "without one snapshot to take"),
        (tmp_path / "hub", "is the hub's cache; name one of its folders models--"),
        (file, "is one file, .* such as model.{}, and set model.base"),
        (folder, "is a folder of weights, .* such as model.{}, and set model.base"),
    ):
        with pytest.raises(UserError, match=said.format("vae")):
            ModelPaths(base=str(base)).locate("vae")
        with pytest.raises(UserError, match=said.format("transformer")):
            arch_here(TOY, ModelPaths(base=str(base)))

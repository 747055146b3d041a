"""Checks of a family against diffusers: outputs, every gradient, names, adapter files, and the
steps of a sample.

    class TestDiffusers(DiffusersChecks):
        spec = ZED
        arch = ZedArch(dim=64, …)
        diffusers = DIFFUSERS
        parameters = {"base": 6_154_908_736}
        targets = {"blocks": ("attn.q", "mlp.up")}

        def items(self, count, ragged=False):
            return …

diffusers is imported where a check needs it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.diffusers_model import Conversion, DiffusersModel
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.files.identify import FoundAdapter, find_adapter
from ditkit_core.adapters.files.write import trained_adapters, write_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import GenerationRequest, Sampler
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel, Stages, run_plain
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.testing.sampling import generate_latents
from ditkit_core.testing.specs import altered
from ditkit_core.testing.world import Items, ModelChecks, make_model, over_the_same_tensors

BARS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative difference, by dtype: with the same tables on both sides, the order of summation
is all that differs."""
SIGMA = (0.8125, 0.25, 0.5, 0.625)
"""Noise levels of the samples of a batch, exact in bf16."""
SEEDS = range(4)
"""Of weights whose errors in bf16 are averaged, because one may be lucky."""
FILES: dict[str, tuple[str, Callable[[str], str]]] = {
    **{
        form: (form, lambda name: name) for form in ("official", "diffusers", "diffsynth", "musubi")
    },
    "peft": ("official", lambda name: name.replace("diffusion_model.", "base_model.model.")),
    "no prefix": ("official", lambda name: name.removeprefix("diffusion_model.")),
    **{
        f"{form}, lora_up and lora_down": (
            form,
            lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
        )
        for form in ("official", "diffusers")
    },
}
"""Adapter files that people have: the form that we write, and how its names are changed."""
SPELLINGS = ("diffsynth", "peft", "no prefix", "diffusers, lora_up and lora_down")
"""Of these, those that a program reads or not whatever layers they are on."""


@dataclass(frozen=True)
class Comparison:
    """A batch that both models get."""

    items: Items
    arch: Any = None
    """Of the models; None: the class's."""
    idle: tuple[str, ...] = ()
    """Prefixes of the parameters that have no gradient in either, besides the class's."""


class Steps(NamedTuple):
    """A sample of ours."""

    inputs: Sequence[Tensor]
    """Latents that the model was called with."""
    latents: Tensor
    """At the end."""
    sampler: Sampler


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference, relative to the norm of the second."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def sample_steps(spec: Any, model: StagedModel, paths: ModelPaths, job: GenerationRequest) -> Steps:
    """Sample with our model, in fp32 on the CPU."""
    sampler = spec.auxiliary.sampler(paths, torch.device("cpu"), torch.float32, ())
    inputs: list[Tensor] = []

    def run(model: Stages, batch: Any) -> Any:
        inputs.append(batch.latents[0])
        return run_plain(model, batch)

    with torch.no_grad():
        latents = generate_latents(sampler, job, model, run)
    return Steps(inputs, latents, sampler)


def first_noise(job: GenerationRequest, shape: Sequence[int]) -> Tensor:
    """The noise that our sample starts from, for a pipeline."""
    return torch.randn(tuple(shape), generator=generator(job.seed, "sample"))


def check_steps(
    ours: Steps,
    after: Sequence[Tensor],
    *,
    calls: int,
    bar: float = 2e-4,
    frames: slice = slice(None),
) -> None:
    """Compare the latents after each step with a pipeline's.

    Args:
        after: The pipeline's, in the shape of ours.
        calls: How often a step calls the model: twice with guidance.
        bar: Largest difference, relative to the pipeline's deviation: fp32 in two orders of
            summation, amplified by guidance; diffusers' noise levels and sinusoid are fp32, ours
            fp64.
        frames: Latent frames that are compared.
    """
    assert len(ours.inputs) == calls * len(after)
    for mine, theirs in zip([*ours.inputs[calls::calls], ours.latents], after, strict=True):
        difference = float((mine - theirs)[:, frames].abs().max() / theirs.std())
        assert difference < bar, difference
    assert (ours.latents - ours.inputs[0])[:, frames].abs().max() > 0.5, (
        "the sample is no longer noise"
    )


def _widen(patch: pytest.MonkeyPatch) -> None:
    """Make torch's conversions to fp32 conversions to fp64."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    to = Tensor.to

    def widened(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        args = tuple(wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        if "dtype" in options:
            options["dtype"] = wide.get(options["dtype"], options["dtype"])
        return to(tensor, *args, **options)

    patch.setattr(Tensor, "to", widened)
    patch.setattr(Tensor, "float", Tensor.double)


def _renamed(
    tensors: Mapping[str, Tensor], parts_of: Callable[[str], Sequence[TensorSlice] | None]
) -> dict[str, Tensor]:
    rows: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        parts = parts_of(name)
        assert parts is not None, f"{name} is unknown"
        for part, piece in zip(parts, tensor.chunk(len(parts) or 1), strict=bool(parts)):
            rows.setdefault(part.name, {})[part.index] = piece
    # one piece as it is: without memory, joining takes longer than all else at full size
    return {
        name: pieces[0] if len(pieces) == 1 else torch.cat([pieces[i] for i in sorted(pieces)])
        for name, pieces in rows.items()
    }


class DiffusersChecks(ModelChecks):
    """Inherit next to the class with a family's tiny items, and set `diffusers`, `parameters` and
    `targets`."""

    diffusers: ClassVar[DiffusersModel]
    parameters: ClassVar[Mapping[str, int]]
    """Numbers of parameters by preset."""
    targets: ClassVar[Mapping[str, Sequence[str]]]
    """Layers that adapters are on, by a name for them: those of blocks first, which can be DoRAs
    too."""
    nearer: ClassVar[float] = 0.9
    """Largest error in bf16, as a part of diffusers' own."""
    nearer_cases: ClassVar[tuple[str, ...]] = ("alike",)
    """The batches of `cases` that are computed in bf16."""
    files: ClassVar[Mapping[str, tuple[str, Callable[[str], str]]]] = FILES
    """Adapter files; as `FILES`."""
    converter: ClassVar[tuple[str, Conversion] | None] = None
    """A form and diffusers' conversion of its files; None: `DiffusersModel.convert`, of official
    ones."""

    def cases(self) -> Mapping[str, Comparison]:
        """Batches, by a name for them."""
        items = self.items(3, ragged=True)
        return {
            "one": Comparison(items[:1]),
            "alike": Comparison(items[::2]),
            "ragged": Comparison(items),
        }

    def exact(self, patch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        """Make diffusers compute tables in a dtype that it computes in fp32: the sinusoid of the
        noise level, and rotary ones in fp64."""

    def class_arguments(self, arch: Any) -> Mapping[str, Any]:
        """Arguments of diffusers' class for an architecture of `presets`, besides its defaults."""
        return {}

    def index(self, arch: Any) -> Mapping[str, Any]:
        """What `model_index.json` says about an architecture."""
        return {}

    def arch_in_files(self, arch: Any) -> Any:
        """An architecture of `presets` as far as its files describe it."""
        return arch

    def files_on(self, targets: str) -> list[tuple[str, bool]]:
        """The files that are compared with adapters on `targets`, each without keys of alpha or
        with them: all on the first targets, and on others those whose rules ask for layers."""
        files = list(product(self.files, (False, True)))
        if targets == next(iter(self.targets)):
            return files
        return [
            (kind, alpha)
            for kind, alpha in files
            if kind not in SPELLINGS and not (alpha and kind in ("diffusers", "musubi"))
        ]

    def is_loaded(self, kind: str, targets: str, alpha: bool) -> bool | None:
        """Whether diffusers loads a file of `files` with adapters on `targets`; None: as our rules
        say."""
        return None

    def run_theirs(self, model: Any, items: Items, sigma: Tensor) -> list[Tensor]:
        """diffusers' velocities: of one sample at a time, because it has one layout for all of a
        batch. What pads a batch in our model changes nothing."""
        return [
            self.diffusers.run(model, self._inputs([item], sigma[i : i + 1]))
            for i, item in enumerate(items)
        ]

    def run_ours(self, model: Any, items: Items, sigma: Tensor) -> list[Tensor]:
        """Our velocities."""
        outputs: list[Tensor] = model(self._inputs(items, sigma))
        return outputs

    def _inputs(self, items: Items, sigma: Tensor) -> Any:
        latents = [item["latents"] for item in items]
        return self.spec.training.make_inputs(latents, sigma, items, 1.0)

    def native(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a form's names, by ours."""
        return _renamed(tensors, self.diffusers.names.to_native)

    def in_form(self, form: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of our names as a file of a form has them."""
        names, stored = self.diffusers.names, dict[str, Tensor]()
        for name, tensor in _renamed(tensors, names.from_native[form]).items():
            stored |= names.stored(form, name, tensor)
        return stored

    def diffusers_model(self, arch: Any, seed: int = 0) -> nn.Module:
        """diffusers' model with random weights, none at an initial one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = self._kind(arch)(**self.diffusers.config(arch))
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape)
                if parameter.ndim == 1:
                    parameter.data = 0.2 * noise + name.endswith("weight")
                else:
                    parameter.data = noise / parameter.shape[-1] ** 0.5
        return model

    def our_model(self, theirs: nn.Module, arch: Any, dtype: torch.dtype) -> Any:
        """Our model with the weights of diffusers', which stay fp32 where a run has them so."""
        model = self.spec.architecture.build(arch, Precision(matmul=dtype))
        model.load_state_dict(self.native(theirs.state_dict()))
        for name, parameter in model.named_parameters():
            keeps = dtype == torch.bfloat16 and self.spec.precision.keep_fp32(name)
            parameter.data = parameter.data.to(torch.float32 if keeps else dtype).clone()
        return model

    def _kind(self, arch: Any) -> Any:
        return resolve_name(f"diffusers:{self.diffusers.kind(arch)}")

    @contextmanager
    def _exact(self, dtype: torch.dtype) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.exact(patch, dtype)
            if dtype == torch.float64:
                _widen(patch)
            yield

    def outcome(
        self,
        model: nn.Module,
        run: Callable[[Any, Items, Tensor], list[Tensor]],
        items: Items,
        dtype: torch.dtype,
    ) -> dict[str, Tensor | None]:
        """Outputs, and gradients of inputs and parameters, by our names; None where there is
        none."""
        leaves = [
            {
                name: x
                if name.startswith(self.idle)
                else x.detach().to(dtype, copy=True).requires_grad_()
                for name, x in item.items()
            }
            for item in items
        ]
        sigma = torch.tensor(SIGMA[: len(items)], dtype=torch.float64)
        outputs, random = run(model, leaves, sigma), torch.Generator().manual_seed(5)
        targets = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in outputs]
        losses = [(x.double() - y).square().sum() for x, y in zip(outputs, targets, strict=True)]
        torch.stack(losses).sum().backward()
        results: dict[str, Tensor | None] = {f"output {i}": out for i, out in enumerate(outputs)}
        for i, item in enumerate(leaves):
            results |= {f"{name} {i}": x.grad for name, x in item.items() if x.requires_grad}
        gradients = {name: x.grad for name, x in model.named_parameters()}
        if run == self.run_ours:
            return results | gradients
        without = [name for name, gradient in gradients.items() if gradient is None]
        missing = self.native({name: model.get_parameter(name) for name in without})
        others = self.native({name: x for name, x in gradients.items() if x is not None})
        return results | dict.fromkeys(missing) | others

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The cases of a subclass."""
        if "dtype" in metafunc.fixturenames:
            cases = self.cases()
            # fp64 tells more of each batch, and fp32 what it has of its own of each architecture
            fp32 = {comparison.arch: case for case, comparison in cases.items()}.values()
            metafunc.parametrize(
                ("case", "dtype"),
                [
                    pytest.param(
                        case,
                        dtype,
                        marks=[pytest.mark.slow] * (name == "fp32" and case not in fp32),
                        id=f"{case}-{name}",
                    )
                    for case in cases
                    for dtype, name in zip(BARS, ("fp64", "fp32"), strict=True)
                ],
            )
        elif "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.nearer_cases)
        if "targets" in metafunc.fixturenames:
            metafunc.parametrize("targets", list(self.targets))
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind", ("official", "diffusers"))

    def test_outputs_and_every_gradient_are_those_of_diffusers(
        self, dtype: torch.dtype, case: str
    ) -> None:
        comparison = self.cases()[case]
        arch, idle = comparison.arch or self.arch, (*self.idle, *comparison.idle)
        with self._exact(dtype):
            theirs = self.diffusers_model(arch).to(dtype)
        mine = self.outcome(
            self.our_model(theirs, arch, dtype), self.run_ours, comparison.items, dtype
        )
        with self._exact(dtype):
            expected = self.outcome(theirs, self.run_theirs, comparison.items, dtype)
        assert mine.keys() == expected.keys()
        errors = {}
        for name, them in expected.items():
            we = mine[name]
            if name.startswith(idle):
                assert not any(x is not None and x.any() for x in (we, them)), name
            elif we is None or them is None:
                raise AssertionError(
                    f"{name} has no gradient in {'ours' if we is None else 'diffusers'}"
                )
            elif them.numel():
                assert them.any(), f"{name} has no gradient in diffusers"
                errors[name] = relative(we, them)
        assert max(errors.values()) <= BARS[dtype], max(errors.items(), key=lambda pair: pair[1])

    def test_bf16_is_nearer_to_fp64_than_diffusers(self, case: str) -> None:
        """Equal values of weights and inputs; diffusers as `from_pretrained(torch_dtype=bf16)`
        leaves it. The mean of several weights: outputs, gradients of inputs, and of all parameters
        together."""
        comparison = self.cases()[case]
        arch = comparison.arch or self.arch
        items = [
            {name: x if name.startswith(self.idle) else x.bfloat16() for name, x in item.items()}
            for item in comparison.items
        ]
        errors: dict[str, list[tuple[float, float]]] = {}
        for seed in SEEDS:
            theirs: Any = self.diffusers_model(arch, seed)
            for parameter in theirs.parameters():
                parameter.data = parameter.data.bfloat16().float()
            models = (
                (self.our_model(theirs, arch, torch.float64), self.run_ours, torch.float64),
                (self.our_model(theirs, arch, torch.bfloat16), self.run_ours, torch.bfloat16),
                (theirs, self.run_theirs, torch.bfloat16),
            )
            fp32 = set(theirs._keep_in_fp32_modules or ())
            for name, parameter in theirs.named_parameters():
                if not fp32 & set(name.split(".")):
                    parameter.data = parameter.data.bfloat16()
            idle, names = (*self.idle, *comparison.idle), sorted(self.native(theirs.state_dict()))
            results = []
            for model, run, dtype in models:
                result = {
                    name: x
                    for name, x in self.outcome(model, run, items, dtype).items()
                    if x is not None and not name.startswith(idle)
                }
                gradients = [result.pop(name) for name in names if not name.startswith(idle)]
                result["parameters"] = torch.cat([x.double().flatten() for x in gradients])
                results.append(result)
            truth, mine, them = results
            assert mine["output 0"].dtype == torch.float32
            for name, exact in truth.items():
                pair = relative(mine[name], exact), relative(them[name], exact)
                errors.setdefault(name, []).append(pair)
        for name, pairs in errors.items():
            ours, diffusers = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
            assert ours < self.nearer * diffusers, (name, ours, diffusers)

    def test_names_and_parameters_are_those_of_diffusers_at_full_size(self) -> None:
        """And the architecture is the one that its configuration describes."""
        presets, names = self.spec.architecture.presets, self.diffusers.names
        infer, config = self.spec.architecture.infer_arch, self.diffusers.config
        assert infer is not None
        counted = {}
        for arch in dict.fromkeys(map(self.arch_in_files, presets.values())):
            with on_meta():
                theirs = self._kind(arch)(**self.class_arguments(arch))
                ours = self.spec.architecture.build(arch, Precision()).state_dict()
            counted[arch] = sum(x.numel() for x in ours.values())
            shapes = {name: x.shape for name, x in theirs.state_dict().items()}
            renamed = self.in_form("diffusers", ours)
            assert {name: x.shape for name, x in renamed.items()} == shapes
            for described in (theirs.config, {**theirs.config, **config(arch)}):
                assert infer(dict(described), self.index(arch)) == arch
            for form in names.from_native:
                again = self.native(self.in_form(form, ours))
                assert {name: x.numel() for name, x in again.items()} == {
                    name: x.numel() for name, x in ours.items()
                }, form
            for form, convert in self.converters(arch):
                converted = convert(self.in_form(form, ours))
                assert {name: x.shape for name, x in converted.items()} == shapes, form
        assert self.parameters == {
            preset: counted[self.arch_in_files(arch)] for preset, arch in presets.items()
        }

    def test_the_values_of_each_form_are_those_that_diffusers_converts(self) -> None:
        """Both ways: of our parameters in each form, and of what diffusers' converter makes of
        them."""
        for arch in dict.fromkeys(case.arch or self.arch for case in self.cases().values()):
            model: nn.Module = make_model(self.spec, arch)
            state = {name: x.detach() for name, x in model.named_parameters()}
            files = {form: self.in_form(form, state) for form in self.diffusers.names.from_native}
            assert files["diffusers"].keys() == self.diffusers_model(arch).state_dict().keys()
            for form, convert in self.converters(arch):
                files[f"{form}, converted"] = convert(dict(files[form]))
                assert files[f"{form}, converted"].keys() == files["diffusers"].keys(), form
            for form, tensors in files.items():
                again = self.native(tensors)
                assert again.keys() == state.keys(), form
                for name, tensor in state.items():
                    assert torch.equal(again[name].view_as(tensor), tensor), (form, name)

    def converters(self, arch: Any) -> Sequence[tuple[str, Conversion]]:
        """Forms, and diffusers' conversions of an architecture's files of them."""
        if self.converter is not None:
            return [self.converter]
        return [("official", self.diffusers.convert)] if self.diffusers.convert else []

    def test_rules_of_adapter_files_are_what_diffusers_loader_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: str
    ) -> None:
        """Files of every kind, with keys of alpha and without, loaded by the pipeline's own loader,
        to the outputs of our model."""
        model = self.adapted_model(targets)
        bare = self.diffusers.transformer(model)
        monkeypatch.setattr(DiffusersModel, "transformer", lambda *_: over_the_same_tensors(bare))
        files = self.files_on(targets)
        stored = {
            form: load_file(self.adapter_file(model, tmp_path, form))
            for form in dict.fromkeys(self.files[kind][0] for kind, _ in files)
        }
        for kind, alpha in files:
            form, rename = self.files[kind]
            tensors = {rename(name): x for name, x in stored[form].items()}
            assert any(name.endswith(".alpha") for name in tensors) == (form == "musubi")
            if alpha:
                ends = (".lora_A.", ".lora_down.", ".lora_A.default.")
                stems = {
                    name.partition(end)[0] for name, end in product(tensors, ends) if end in name
                }
                # the rank, as where there is none; musubi has its own
                tensors = {f"{stem}.alpha": torch.tensor(3.0) for stem in stems} | tensors
            file = tmp_path / f"{kind}{' with alpha' * alpha}.safetensors"
            save_file(tensors, file)
            expected = self.is_loaded(kind, targets, alpha)
            loads = self.check_rule(file, model) == ""
            assert expected is None or loads == expected, file.stem
            assert kind != form or alpha or self.find(file, model).layout.form == form, kind

    def test_a_dora_is_read_by_diffusers_in_its_own_names_alone(
        self, tmp_path: Path, kind: str
    ) -> None:
        """Files of official names lose their magnitudes there."""
        model = self.adapted_model(next(iter(self.targets)), use_dora=True)
        config = ExportConfig(forms=(kind,), dtype="fp32")
        (file,) = export_adapter(
            model, self.spec, tmp_path, "adapter", config, metadata={}, exact=True
        )
        rule = self.check_rule(file, model)
        assert (rule == "") == (kind == "diffusers"), rule

    def adapted_model(self, targets: str, **config: Any) -> Any:
        """Our model with an adapter on layers of `targets`."""
        adapter = AdapterConfig(rank=3, alpha=6.0, targets=tuple(self.targets[targets]), **config)
        return make_model(self.spec, self.arch, adapter=adapter).eval()

    def adapter_file(self, model: Any, folder: Path, form: str) -> Path:
        """The file of a model's adapter, also in a form that an export would refuse."""
        file, adapters = folder / "adapter.safetensors", trained_adapters(adapter_layers(model))
        names = self.diffusers.names
        write_adapter(file, adapters, names, form=form, dtype=torch.float32, metadata={})
        return file

    def find(self, file: Path, model: nn.Module) -> FoundAdapter:
        """What we find in a file."""
        layers = {
            name.removesuffix(".base_layer"): tuple(module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".lora_" not in name
        }
        # the presets' many blocks are named once, in `test_names_…_at_full_size`
        return find_adapter(file, altered(self.spec, presets={}), layers=layers)

    def rule(self, file: Path, model: nn.Module) -> str:
        """What our rules have against diffusers for a file; empty if it loads all."""
        adapter = self.find(file, model)
        return self.spec.adapters.rules.readers(adapter.layout, list(adapter.shapes))["diffusers"]

    def check_rule(self, file: Path, model: Any) -> str:
        """`rule`, if diffusers does so."""
        rule, paths = self.rule(file, model), ModelPaths(transformer="tiny.safetensors")
        try:
            line = self.diffusers.verify(file, paths, model, run_plain)
            loads = "agrees with our model" in line
        except UserError as error:
            loads, line = False, str(error)
        assert loads == (rule == ""), (file.stem, rule, line)
        return rule

"""Checks of levers that people know from other trainers: a family's numbers against diffusers'
transformer with peft's adapters."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from ditkit_core.adapters.added_adapter import AddedAdapter, adapters_added
from ditkit_core.adapters.assistant import load_assistant, put_next_to_doras
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.diffusers_model import DiffusersModel
from ditkit_core.adapters.files.export import base_tensors
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.files.write import trained_adapters, write_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.data.masks import at_latent_size
from ditkit_core.encoding.encoded_sample import EMPTY_CAPTION_PREFIX
from ditkit_core.encoding.loss_masks import weighted
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.nn.lora import without_adapters
from ditkit_core.testing.world import ModelChecks, make_model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import NoisedBatch, guiding, matching_base, velocity_errors

_SIGMA, _GUIDANCE = 0.5, 1.0
"""diffusers multiplies both by 1000; the products of these values are exact."""
_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
"""fp32 in two orders of summation."""


class PeerChecks(ModelChecks):
    """Inherit next to the class with a family's tiny items, and set `diffusers`."""

    diffusers: ClassVar[DiffusersModel]
    daily: ClassVar[str] = "lora"
    """The method of an assistant that every change tries; the other is slow."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Assistants, and their strengths."""
        if "strength" in metafunc.fixturenames:
            cases = [
                pytest.param(
                    kind, strength, marks=[pytest.mark.slow] * (kind != self.daily), id=kind
                )
                for kind, strength in (("lora", 0.7), ("dora", 1.0))
            ]
            metafunc.parametrize(("kind", "strength"), cases)

    def test_a_masked_loss_is_that_of_a_mask_over_the_squared_errors_of_diffusers(self) -> None:
        """As the scripts of diffusers and kohya, diffusion-pipe and SimpleTuner have it: squared
        errors, times the mask in the latents' size (one image for all frames of a clip), and their
        mean. A floor outside is OneTrainer's `unmasked_weight`."""
        model: Any = make_model(self.spec, self.arch).eval()
        (item,), random = self.items(1), torch.Generator().manual_seed(0)
        latents, outside = item["latents"], 0.25
        noise = torch.randn(latents.shape, generator=random).requires_grad_()
        frames, height, width = latents.shape[1:]
        mask = (torch.rand(1, 8 * height, 8 * width, generator=random) > 0.6).float()

        cached = at_latent_size(mask.expand(1 + 4 * (frames - 1), -1, -1), (frames, height, width))
        batch = NoisedBatch([weighted(item, cached, outside)], torch.tensor([_SIGMA]), [noise])
        ours = velocity_errors(Model(model, BlockEngine(), self.spec), batch, _GUIDANCE)[0]

        small = functional.interpolate(mask[None], size=(height, width), mode="area")
        predicted = self.diffusers.run(self.diffusers.transformer(model), self._inputs(item, noise))
        squares = functional.mse_loss(predicted, noise - latents, reduction="none")
        theirs = (squares * (outside + (1 - outside) * small)).mean()

        _close(ours, theirs)
        gradients = [torch.autograd.grad(loss, noise)[0] for loss in (ours, theirs)]
        _close(*gradients)
        assert abs(ours - squares.mean()) > 0.1 * ours, "without the mask it is another"

    def test_a_step_that_matches_the_base_has_diffusers_prediction_with_adapters_disabled_as_target(
        self, tmp_path: Path
    ) -> None:
        """ai-toolkit's preservations and OneTrainer's prior prediction: what the model predicts
        while its network is switched off."""
        model = self._adapted(4)
        (item,) = self.items(1)
        noise = torch.randn(item["latents"].shape, generator=torch.Generator().manual_seed(0))
        train = Model(model, BlockEngine(), self.spec)
        batch = matching_base(
            train, NoisedBatch([item], torch.tensor([_SIGMA]), [noise]), _GUIDANCE
        )
        assert batch.targets is not None
        theirs, inputs = self.diffusers.transformer(model), self._inputs(item, noise)
        theirs.load_lora_adapter(
            self._written(model, tmp_path / "own.safetensors"), adapter_name="own"
        )
        with torch.no_grad():
            ours = velocity_errors(train, batch, _GUIDANCE)[0]
            predicted = self.diffusers.run(theirs, inputs)
            theirs.disable_adapters()
            target = self.diffusers.run(theirs, inputs)
        _close(batch.targets[0], target)
        torch.testing.assert_close(ours, functional.mse_loss(predicted, target), rtol=1e-3, atol=0)
        assert ours > 1e-4

    @pytest.mark.parametrize("schedule", ["constant", "sigma"])
    def test_a_guided_target_is_guidance_from_diffusers_prediction_without_caption(
        self, tmp_path: Path, schedule: Literal["constant", "sigma"]
    ) -> None:
        """ai-toolkit's contrastive loss: from what the model predicts for the empty caption, past
        the sample's velocity."""
        model = self._adapted(4)
        item, other = self.items(2)
        noise = torch.randn(item["latents"].shape, generator=torch.Generator().manual_seed(0))
        guided = {**item, f"{EMPTY_CAPTION_PREFIX}text": other["text"]}
        flow = FlowConfig(target_guidance=3.0, target_schedule=schedule, guidance=_GUIDANCE)
        train = Model(model, BlockEngine(), self.spec)
        batch = guiding(train, NoisedBatch([guided], torch.tensor([_SIGMA]), [noise]), flow)
        assert batch.targets is not None
        theirs = self.diffusers.transformer(model)
        theirs.load_lora_adapter(
            self._written(model, tmp_path / "own.safetensors"), adapter_name="own"
        )
        with torch.no_grad():
            unconditional = self.diffusers.run(
                theirs, self._inputs({**item, "text": other["text"]}, noise)
            )
            predicted = self.diffusers.run(theirs, self._inputs(item, noise))
        guidance = 3.0 if schedule == "constant" else 1 + 2 * _SIGMA
        target = unconditional + guidance * (noise - item["latents"] - unconditional)
        # The target has the prediction 1 - guidance times, and so its rounding.
        atol = 1e-5 * max(1.0, guidance - 1)
        torch.testing.assert_close(batch.targets[0], target, rtol=1e-4, atol=atol)
        ours = velocity_errors(train, batch, _GUIDANCE)[0]
        torch.testing.assert_close(ours, functional.mse_loss(predicted, target), rtol=1e-3, atol=0)

    # two adapters are what is asked for
    @pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
    def test_an_assistant_is_an_adapter_that_diffusers_has_in_training_and_not_in_samples(
        self, tmp_path: Path, kind: str, strength: float
    ) -> None:
        """ai-toolkit's `assistant_lora_path`; here it is merged into the base that trains, and
        taken off each layer for samples."""
        model = self._adapted(4)
        # of its own: the base changes below
        theirs = copy.deepcopy(self.diffusers.transformer(model))
        theirs.load_lora_adapter(
            self._written(model, tmp_path / "own.safetensors"), adapter_name="own"
        )
        path = tmp_path / "assistant.safetensors"
        theirs.load_lora_adapter(
            self._written(self._adapted(3, use_dora=kind == "dora"), path), adapter_name="assistant"
        )
        layers = {
            name: (layer.out_features, layer.in_features)
            for name, layer in adapter_layers(model).items()
        }
        file = open_adapter(path, self.diffusers.names, layers)
        (item,) = self.items(1)
        inputs = self._inputs(item, torch.ones_like(item["latents"]))
        outputs, expected = {}, {}
        with torch.no_grad():
            base = base_tensors(model)
            before = {name: tensor.clone() for name, tensor in base.items()}
            for name, edit in merge_into([(file, strength)]).items():
                edit(base[name])
            outputs["training"] = model(inputs)[0]
            taken_out = AddedAdapter(file, strength, lambda module: before[f"{module}.weight"])
            with adapters_added(model, [taken_out], lambda name: torch.float32):
                outputs["samples"] = model(inputs)[0]
            # Last in the first list: peft scales what earlier adapters added with a DoRA's factors
            # too.
            for where, names in (("training", ["assistant", "own"]), ("samples", ["own"])):
                theirs.set_adapters(names, [strength, 1.0][-len(names) :])
                expected[where] = self.diffusers.run(theirs, inputs)
        for where, output in outputs.items():
            _close(output, expected[where])
        assert (outputs["training"] - outputs["samples"]).norm() > 0.01 * outputs["samples"].norm()

    @pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
    def test_a_dora_and_its_assistant_are_two_adapters_of_diffusers_and_the_dora_is_over_the_bare_base(
        self, tmp_path: Path
    ) -> None:
        """In training both, when adapters are off the assistant alone, in samples the DoRA alone:
        outputs, and gradients of the input."""
        model = self._adapted(4, use_dora=True)
        path = tmp_path / "assistant.safetensors"
        strength = 0.7
        theirs = self.diffusers.transformer(model)
        theirs.load_lora_adapter(
            self._written(model, tmp_path / "own.safetensors"), adapter_name="own"
        )
        theirs.load_lora_adapter(self._written(self._adapted(3), path), adapter_name="assistant")
        layers = {
            name: (layer.out_features, layer.in_features)
            for name, layer in adapter_layers(model).items()
        }
        file = open_adapter(path, self.diffusers.names, layers)
        merged = [(file, strength)]
        assistant = put_next_to_doras(model, merged, "base.assistant")
        load_assistant(model, assistant, device_of=lambda name: torch.device("cpu"), put=None)
        assert not merged[0][0].modules, "nothing of it is merged"
        (item,) = self.items(1)
        noise = torch.randn(
            item["latents"].shape, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        base = base_tensors(model)
        taken_out = AddedAdapter(file, strength, lambda module: base[f"{module}.weight"])
        # Ours is the order of peft's sum: a DoRA scales what adapters before it have added.
        for ways, names in (
            ((nullcontext(),), ["own", "assistant"]),
            ((without_adapters(model),), ["assistant"]),
            (
                (adapters_added(model, [taken_out], lambda name: torch.float32), torch.no_grad()),
                ["own"],
            ),
        ):
            with ExitStack() as stack:
                for way in ways:
                    stack.enter_context(way)
                actual = model(self._inputs(item, noise))[0]
            theirs.set_adapters(
                names, [{"own": 1.0, "assistant": strength}[name] for name in names]
            )
            expected = self.diffusers.run(theirs, self._inputs(item, noise))
            _close(actual, expected)
            if actual.requires_grad:
                _close(
                    *(
                        torch.autograd.grad(output.square().mean(), noise)[0]
                        for output in (actual, expected)
                    )
                )

    def _adapted(self, rank: int, *, use_dora: bool = False) -> Any:
        return make_model(
            self.spec, self.arch, adapter=AdapterConfig(rank=rank, use_dora=use_dora)
        ).eval()

    def _written(self, model: Any, path: Path) -> dict[str, Tensor]:
        """The tensors of the file with the model's adapter in diffusers' names."""
        adapters, names = trained_adapters(adapter_layers(model)), self.diffusers.names
        write_adapter(path, adapters, names, form="diffusers", dtype=torch.float32, metadata={})
        return load_file(path)

    def _inputs(self, item: Mapping[str, Tensor], noise: Tensor) -> Any:
        sigma = torch.tensor([_SIGMA])
        noised = (1 - _SIGMA) * item["latents"] + _SIGMA * noise
        return self.spec.training.make_inputs([noised], sigma, [item], _GUIDANCE)

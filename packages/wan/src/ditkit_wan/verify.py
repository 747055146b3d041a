"""Prove an exported adapter: diffusers loads the file and gets the output that our own model has."""

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters import adapter_layers, canonical_name, is_adapter_name
from ditkit_core.components import Components
from ditkit_core.ema import swapped
from ditkit_core.errors import UserError
from ditkit_core.model import Engine
from ditkit_core.randomness import generator
from ditkit_core.safetensors_file import SafetensorsSource
from ditkit_wan.model import WanInputs
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import to_diffusers

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative difference (of norms) by the matmuls' dtype. fp32: orders of summation differ. 16 bits: diffusers
rounds its residual stream and modulation in every block, where ours keep fp32."""


def verify_export(adapter_file: Path, components: Components, model: Any, run: Engine) -> str:
    """Load an adapter file with diffusers over our own base weights, and compare outputs on fixed random inputs.

    The base is handed over in memory, tensor by tensor under diffusers' names, not read again: that costs no memory,
    keeps what was merged into it, and works for bases in any layout.

    Args:
        adapter_file: The file, in official or diffusers form.
        components: Where the model lies; named in messages.
        model: Our model with the adapter that the file should hold, on any device.
        run: The engine that runs it.

    Returns:
        One line that says what was compared and how close it was.

    Raises:
        UserError: If diffusers rejects the file, or the outputs differ; so also if only ours has an effect.
    """
    inputs = _inputs(model)
    dtype = model.embed.precision.matmul
    transformer = _diffusers_transformer(model)
    with torch.no_grad():
        bare = _run_diffusers(transformer, inputs)
        _load_adapter(transformer, adapter_file)
        theirs = _run_diffusers(transformer, inputs)
        with _rounded_adapter(model, adapter_file):
            ours = run(model, inputs)[0].float()
    effect, difference = _relative(theirs, bare), _relative(theirs, ours)
    where = f"{adapter_file} over {components.transformer or components.base}"
    if not difference <= TOLERANCE[dtype]:
        raise UserError(
            f"{where}: diffusers' output differs from ours by {difference:.1e} (at most {TOLERANCE[dtype]:.0e} "
            "expected); the file is not this model's adapter, export it again"
        )
    if effect == 0:
        return f"diffusers loads {adapter_file.name}, which changes nothing yet, in our model either"
    line = (
        f"diffusers loads {adapter_file.name} and agrees with our model to {difference:.1e} "
        f"(the adapter changes {effect:.1e})"
    )
    if effect <= TOLERANCE[dtype]:
        short = str(dtype).removeprefix("torch.")
        line += f"; {short} cannot tell so small a change from rounding: only names and shapes are proven"
    return line


def _inputs(model: Any) -> WanInputs:
    """A tiny clip of noise at a middle noise level, with a short text; on the model's device."""
    arch: WanArch = model.embed.arch
    device = model.embed.patch_embedding.weight.device
    random = generator("verify export")
    latents = torch.randn(arch.in_channels, *(2 * step for step in arch.patch), generator=random)
    text = torch.zeros(arch.text_tokens, arch.text_dim)
    text[:8] = torch.randn(8, arch.text_dim, generator=random)
    return WanInputs([latents.to(device)], torch.tensor([600.0], device=device), [text.to(device)])


def _diffusers_transformer(model: Any) -> Any:
    """diffusers' transformer over the very tensors of our base, without its adapter.

    What diffusers computes in the matmuls' dtype is cast; these are small. Blocks' matrices are shared.
    """
    from diffusers import WanTransformer3DModel

    arch: WanArch = model.embed.arch
    with torch.device("meta"):
        transformer = WanTransformer3DModel(
            patch_size=arch.patch, num_attention_heads=arch.heads, attention_head_dim=arch.head_dim,
            in_channels=arch.in_channels, out_channels=arch.out_channels, text_dim=arch.text_dim,
            freq_dim=arch.freq_dim, ffn_dim=arch.ffn_dim, num_layers=arch.layers, eps=arch.eps,
        )  # fmt: skip
    base = {canonical_name(name): tensor for name, tensor in model.state_dict().items() if not is_adapter_name(name)}
    fp32 = tuple(transformer._keep_in_fp32_modules)
    dtype = model.embed.precision.matmul
    state = {}
    for name, tensor in base.items():
        theirs = to_diffusers(name)
        keep = any(part in fp32 for part in theirs.split("."))
        state[theirs] = tensor.to(torch.float32 if keep and dtype != torch.float64 else dtype)
    transformer.load_state_dict(state, strict=True, assign=True)
    device = model.embed.patch_embedding.weight.device
    transformer.rope = type(transformer.rope)(arch.head_dim, arch.patch, 1024).to(device)  # its tables are on meta
    return transformer.eval()


def _load_adapter(transformer: Any, adapter_file: Path) -> None:
    """Load the file as a user does, in a pipeline that has nothing but the transformer."""
    from diffusers import WanPipeline

    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer)
    try:
        pipeline.load_lora_weights(str(adapter_file), local_files_only=True)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{adapter_file}: diffusers does not load it ({reason}); export it again") from error
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # 16-bit files would be multiplied in 16 bits, ours never are


def _run_diffusers(transformer: Any, inputs: WanInputs) -> Tensor:
    dtype = transformer.patch_embedding.weight.dtype
    latents, text = inputs.latents[0][None].to(dtype), inputs.text[0][None].to(dtype)
    return transformer(latents, inputs.timestep, text, return_dict=False)[0][0].float()


def _rounded_adapter(model: Any, adapter_file: Path) -> AbstractContextManager[None]:
    """Inside it the model's adapter is rounded as the file's is, so that the comparison is exact for any file."""
    dtypes = {stored.dtype for stored in SafetensorsSource.open(adapter_file).tensors.values()}
    parameters, values = {}, {}
    for module, layer in adapter_layers(model).items():
        parts = {"lora_A": 1.0, "lora_B": layer.scaling["default"], "lora_magnitude_vector": 1.0}
        for part, scale in parts.items():  # the file has the scaling folded into B
            if "default" not in getattr(layer, part):
                continue
            name, parameter = f"{module}.{part}", getattr(layer, part)["default"].weight
            rounded = parameter.detach().float() * scale
            for dtype in dtypes:
                rounded = rounded.to(dtype).float()
            parameters[name], values[name] = parameter, rounded / scale
    return swapped(parameters, values)


def _relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference in units of the first one's; infinite where either is not finite."""
    value = float((a - b).norm() / a.norm())
    return float("inf") if math.isnan(value) else value

"""Parts of tools/gpu/gpu_truth.py: the training steps of musubi-tuner and of DiffSynth-Studio, from
checkouts of them, with random weights.

    uv run tools/gpu/gpu_truth.py --only musubi diffsynth --musubi DIR --diffsynth DIR

No code of theirs is here. Their own classes build the model, add the LoRA, and make optimizer, loss
and autocast, as the command of their documentation sets them up: musubi-tuner `--sdpa
--mixed_precision bf16 --network_dim 32`, with AdamW in place of bitsandbytes' in 8 bits;
DiffSynth-Studio its script of each model, rank 32, all in bf16. Only the files that they would read
are replaced: weights by random ones, encoded clips and captions by random tensors, at the sizes of
`gpu_models`. The loops are theirs without logs, saves and progress bars. Read for musubi-tuner
0.3.4 and DiffSynth-Studio 2.1.2.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from device_clock import attempted
from ditkit_core.io.memory import release_memory
from gpu_cases import CASES, LORA, Case, described, small
from gpu_models import Step, measured, random_batch, weights

Rows = Iterator[dict[str, Any]]
POLICIES = {"klein4b": ("full", "none"), "dev": ("full",), "wan14b": ("full", "full+offload")}
"""By part of `gpu_models`, in our words: with checkpointing, without, and with the inputs of
checkpointed blocks on the host."""
NAMES = {"musubi": "musubi-tuner", "diffsynth": "DiffSynth-Studio"}
SOURCES = {"musubi": "src", "diffsynth": "."}
"""Folder of each checkout that Python imports from."""


def peers(trainer: str, checkout: Path, device: torch.device, tiny: bool) -> Rows:
    """Steps of one trainer, at the sizes of each part."""
    sys.path.insert(0, str((checkout / SOURCES[trainer]).resolve()))
    build = {"musubi": musubi, "diffsynth": diffsynth}[trainer]
    for part, policies in POLICIES.items():
        if tiny and part == "dev":
            continue  # klein runs the same code
        if trainer == "musubi" and part == "wan14b" and device.type == "cpu":
            yield {
                "name": part,
                "value": "its Wan needs autocast to fp32, which a CPU does not have",
            }
            continue
        for policy in policies:
            cases = [small(case) for case in CASES[part][:1]] if tiny else CASES[part]
            name = f"{cases[0].preset}, {policy}"
            yield from attempted(
                name, partial(_steps, NAMES[trainer], build, cases, policy, device, tiny)
            )
            release_memory()


def _steps(
    trainer: str,
    build: Callable[..., Any],
    cases: list[Case],
    policy: str,
    device: torch.device,
    tiny: bool,
) -> Rows:
    inputs_of, module = build(cases[0], policy, device, tiny)
    yield {"name": f"{cases[0].preset}, {policy}", **weights(module)}
    for case in cases:
        item = {
            name: tensor.to(device)
            for name, tensor in random_batch(described(case, tiny)[3]).items[0].items()
        }
        repeats = 1 if tiny or "offload" in policy else min(case.repeats, 4)
        labels = {
            "name": f"{case.name}, {policy}",
            "case": case.name,
            "trainer": trainer,
            "policy": policy,
        }
        row = partial(_row, labels, partial(inputs_of, case, item), repeats, device)
        yield from attempted(f"{case.name}, {policy}", row)


def _row(
    labels: Mapping[str, str], make: Callable[[], Step], repeats: int, device: torch.device
) -> Rows:
    yield {**labels, **measured(make(), repeats, device)}


def randomised(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with random weights where it has parameters on `meta`."""
    values = {
        name: 0.02 * torch.randn(parameter.shape, device=device, dtype=dtype)
        for name, parameter in model.named_parameters()
        if parameter.is_meta
    }
    model.load_state_dict(values, strict=False, assign=True)
    return model.to(device)  # buffers, which it computed itself


def musubi(
    case: Case, policy: str, device: torch.device, tiny: bool
) -> tuple[Callable[[Case, Mapping[str, Tensor]], Step], nn.Module]:
    """Its trainer of the family, up to the loop."""
    with _with_a_gpu(device):
        # Wan's VAE asks for the GPU when it is imported.
        from musubi_tuner import flux_2_train_network, wan_train_network
    from musubi_tuner.modules.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
    from musubi_tuner.training.parser_common import setup_parser_common

    arch = described(case, tiny)[1]
    parser = setup_parser_common()
    if case.family == "wan":
        parser = wan_train_network.wan_setup_parser(parser)
        base = wan_train_network.WanNetworkTrainer
        family = [
            "--task",
            "t2v-14B",
            "--network_module",
            "networks.lora_wan",
            "--timestep_sampling",
            "shift",
            "--discrete_flow_shift",
            "3.0",
        ]
    else:
        parser = flux_2_train_network.flux2_setup_parser(parser)
        base = flux_2_train_network.Flux2NetworkTrainer
        family = [
            "--model_version",
            case.preset,
            "--network_module",
            "networks.lora_flux_2",
            "--timestep_sampling",
            "flux2_shift",
        ]
    checkpointing = {
        "none": [], "full": ["--gradient_checkpointing"],
        "full+offload": ["--gradient_checkpointing", "--gradient_checkpointing_cpu_offload"],
    }  # fmt: skip
    args = parser.parse_args([
        "--dit", "random", "--dataset_config", "random", "--sdpa", "--mixed_precision", "bf16",
        "--network_dim", str(LORA),
        "--optimizer_type", "AdamW", "--learning_rate", "1e-4", "--weighting_scheme", "none",
        "--max_train_steps", "1000",
        *family, *checkpointing[policy],
    ])  # fmt: skip
    args.dit_dtype = None

    class Trainer(base):  # type: ignore[misc,valid-type]
        """Builds the transformer as it does, and reads no file."""

        def load_transformer(
            self,
            accelerator: Any,
            args: Any,
            dit_path: str,
            attn_mode: str,
            split_attn: bool,
            loading_device: Any,
            dit_weight_dtype: Any,
        ) -> Any:
            from accelerate import init_empty_weights

            with init_empty_weights():
                model = (
                    _wan_of_musubi(arch, attn_mode, split_attn)
                    if case.family == "wan"
                    else _flux2_of_musubi(arch, attn_mode, split_attn)
                )
            return randomised(model, torch.device(loading_device), dit_weight_dtype)

    trainer = Trainer()
    with patch.object(wan_train_network, "detect_wan_sd_dtype", lambda path: torch.bfloat16):
        trainer.handle_model_specific_args(args)
    accelerator, weight_dtype, dit_dtype, dit_weight_dtype, _ = (
        trainer._prepare_accelerator_and_dtypes(args)
    )
    transformer = trainer._load_dit_and_swap(args, accelerator, dit_weight_dtype)
    network = trainer._build_network(args, accelerator, transformer, None, weight_dtype)
    parameters, _ = network.prepare_optimizer_params(unet_lr=args.learning_rate)
    optimizer = trainer.get_optimizer(args, parameters)[2]
    scheduler = trainer.get_lr_scheduler(args, optimizer, accelerator.num_processes)
    loader = torch.utils.data.DataLoader([0])  # type: ignore[arg-type,var-annotated]
    transformer, network, optimizer, _, scheduler, training_model, network_dtype = (
        trainer._prepare_with_accelerator(
            args,
            accelerator,
            transformer,
            network,
            optimizer,
            loader,
            scheduler,
            weight_dtype,
            dit_dtype,
            dit_weight_dtype,
        )
    )
    noise_scheduler = FlowMatchDiscreteScheduler(
        shift=args.discrete_flow_shift, reverse=True, solver="euler"
    )

    def step_of(case: Case, item: Mapping[str, Tensor]) -> Step:
        latents = (
            item["latents"][None] if case.family == "wan" else item["latents"].squeeze(1)[None]
        )
        batch = {
            "latents": latents,
            "timesteps": None,
            **({"t5": [item["text"]]} if case.family == "wan" else {"ctx_vec": item["text"][None]}),
        }

        def step() -> float:
            with accelerator.accumulate(training_model):
                accelerator.unwrap_model(network).on_step_start()
                scaled = trainer.scale_shift_latents(latents)
                noise = torch.randn_like(scaled)
                loss, _ = trainer.process_batch(
                    args,
                    accelerator,
                    transformer,
                    network,
                    batch,
                    scaled,
                    noise,
                    noise_scheduler,
                    dit_dtype,
                    network_dtype,
                    None,
                    0,
                )
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(
                    accelerator.unwrap_model(network).get_trainable_params(), args.max_grad_norm
                )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            return float(loss.detach().item())

        return step

    both = nn.ModuleList([accelerator.unwrap_model(transformer), accelerator.unwrap_model(network)])
    return step_of, both


def _with_a_gpu(device: torch.device) -> AbstractContextManager[Any]:
    return (
        nullcontext()
        if device.type == "cuda"
        else patch.object(torch.cuda, "current_device", lambda: 0)
    )


def _wan_of_musubi(arch: Any, attn_mode: str, split_attn: bool) -> nn.Module:
    from musubi_tuner.wan.modules.model import WanModel

    return WanModel(  # type: ignore[no-any-return]
        model_type="t2v", model_version="2.1", dim=arch.dim, eps=arch.eps, ffn_dim=arch.ffn_dim,
        freq_dim=arch.freq_dim,
        in_dim=arch.in_channels, num_heads=arch.heads, num_layers=arch.layers,
        out_dim=arch.out_channels, text_len=arch.text_tokens,
        text_dim=arch.text_dim, attn_mode=attn_mode, split_attn=split_attn,
    )  # fmt: skip


def _flux2_of_musubi(arch: Any, attn_mode: str, split_attn: bool) -> nn.Module:
    from musubi_tuner.flux_2.flux2_models import Flux2, Flux2Params

    params = Flux2Params(
        context_in_dim=arch.text_dim, hidden_size=arch.dim, num_heads=arch.heads,
        depth=arch.double_layers,
        depth_single_blocks=arch.single_layers, use_guidance_embed=arch.guidance,
    )  # fmt: skip
    return Flux2(params, attn_mode, split_attn)  # type: ignore[no-any-return]


def diffsynth(
    case: Case, policy: str, device: torch.device, tiny: bool
) -> tuple[Callable[[Case, Mapping[str, Tensor]], Step], nn.Module]:
    """Its pipeline and training module of the family, up to the loop."""
    import accelerate
    from diffsynth.core.vram.initialization import skip_model_initialization
    from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchSFTLoss
    from diffsynth.diffusion.runner import get_optimizer_class

    arch = described(case, tiny)[1]
    accelerator = accelerate.Accelerator(cpu=device.type == "cpu")
    with skip_model_initialization():
        pipe, dit, targets = (_wan_of_diffsynth if case.family == "wan" else _flux2_of_diffsynth)(
            arch, device
        )
    pipe.dit = randomised(dit, device, torch.bfloat16)

    class Training(DiffusionTrainingModule):  # type: ignore[misc]
        """As in its scripts, without the units of the pipeline that encode images and text."""

        def __init__(self) -> None:
            super().__init__()
            self.pipe = pipe
            self.switch_pipe_to_training_mode(self.pipe, None, "dit", targets, LORA, task="sft")

        def forward(self, inputs: Mapping[str, Any]) -> Tensor:
            """The loss of its supervised fine-tune."""
            return FlowMatchSFTLoss(self.pipe, **inputs)  # type: ignore[no-any-return]

    model = Training()
    optimizer = get_optimizer_class()(model.trainable_modules(), lr=1e-4, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model.to(device=accelerator.device)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step_of(case: Case, item: Mapping[str, Tensor]) -> Step:
        flags = {
            "use_gradient_checkpointing": policy != "none",
            "use_gradient_checkpointing_offload": "offload" in policy,
        }
        latents, text = (item[name].bfloat16()[None] for name in ("latents", "text"))
        inputs: dict[str, Any] = {
            "input_latents": latents,
            "context": text,
            "cfg_merge": False,
            "vace_scale": 1,
            **flags,
        }
        if case.family == "flux2":
            inputs = {**_inputs_of_flux2(pipe, latents, text), **flags}

        def step() -> float:
            with accelerator.accumulate(model):
                loss = model(inputs)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            return float(loss.item())

        return step

    return step_of, accelerator.unwrap_model(model)


def _wan_of_diffsynth(arch: Any, device: torch.device) -> tuple[Any, nn.Module, str]:
    from diffsynth.models.wan_video_dit import WanModel
    from diffsynth.pipelines.wan_video import WanVideoPipeline

    dit = WanModel(
        dim=arch.dim, in_dim=arch.in_channels, ffn_dim=arch.ffn_dim, out_dim=arch.out_channels,
        text_dim=arch.text_dim,
        freq_dim=arch.freq_dim, eps=arch.eps, patch_size=[1, 2, 2], num_heads=arch.heads,
        num_layers=arch.layers, has_image_input=False,
    )  # fmt: skip
    return WanVideoPipeline(device=device, torch_dtype=torch.bfloat16), dit, "q,k,v,o,ffn.0,ffn.2"


def _flux2_of_diffsynth(arch: Any, device: torch.device) -> tuple[Any, nn.Module, str]:
    from diffsynth.models.flux2_dit import Flux2DiT
    from diffsynth.pipelines.flux2_image import Flux2ImagePipeline

    dit = Flux2DiT(
        num_layers=arch.double_layers, num_single_layers=arch.single_layers,
        num_attention_heads=arch.heads,
        joint_attention_dim=arch.text_dim, guidance_embeds=arch.guidance,
    )  # fmt: skip
    double = "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,linear_in,linear_out,to_qkv_mlp_proj"
    single = (
        f"single_transformer_blocks.{index}.attn.to_out" for index in range(arch.single_layers)
    )
    return (
        Flux2ImagePipeline(device=device, torch_dtype=torch.bfloat16),
        dit,
        ",".join([double, *single]),
    )


def _inputs_of_flux2(pipe: Any, latents: Tensor, text: Tensor) -> dict[str, Any]:
    from diffsynth.pipelines.flux2_image import Flux2Unit_ImageIDs, Flux2Unit_PromptEmbedder

    rows, columns = latents.shape[-2:]
    return {
        "input_latents": latents.flatten(2).transpose(1, 2).contiguous(), "prompt_embeds": text,
        "embedded_guidance": 1.0,
        "text_ids": Flux2Unit_PromptEmbedder().prepare_text_ids(text).to(text.device),
        **Flux2Unit_ImageIDs().process(pipe, 16 * rows, 16 * columns),
    }  # fmt: skip

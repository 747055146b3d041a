"""ComfyUI's server with whole workflows over HTTP, against our own Euler steps from the same noise.

    COMFY=FOLDER uv run tools/clients/comfyui_server.py  # one model of each family
    COMFY=FOLDER uv run tools/clients/comfyui_server.py --models klein

`COMFY` is a clone of ComfyUI with its requirements next to ditkit; its pages are not needed. The
server runs on the loopback, on the CPU in fp32, over a folder of its own with tiny models, and is
ended when the tool ends.

Workflows are those of docs/comfyui.md: load, LoRA, sample, save the latent. Conditioning comes from
a node that the tool brings, because text encoders are gigabytes. The rows go to stdout; the exit
status is 1 where a latent is not ours, or where the server leaves out a key of a LoRA.
"""

import argparse
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from client_models import ARCHS, GUIDANCE, base_file, distance, item_of, load_ours
from comfyui import import_comfyui, stand_in_for_sound, written
from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.families.euler import shifted_levels
from ditkit_core.loading.model import Model
from ditkit_flux2 import FLUX2
from ditkit_flux2.schedule import sigmas as flux2_levels
from ditkit_wan import WAN

STEPS, SEED = 4, 11
FORMATS = ("float8_e4m3fn", "mxfp8", "nvfp4")
SHIFTS = {"wan": 5.0, "zimage": 3.0}
SAME = 1e-4
"""Latents of four fp32 steps of two programs differ by 1e-5; a LoRA changes them by 1e-1."""
ROUNDED = 0.5
"""Most that may be lost of a LoRA's change where its sum with the base is rounded: 0.04 to 0.25
are."""
Link = list[Any]
"""A node's number and the index of its output."""


@dataclass(frozen=True)
class Row:
    """A workflow: a model's name, and by stage its file and LoRA."""

    label: str
    name: str
    stages: Sequence[tuple[Path, Path | None]]
    references: int = 0
    rounded: bool = False
    """Whether the base has 4 or 8 bits and a LoRA, whose sum ComfyUI rounds to these bits again."""


class Server:
    """ComfyUI's server over a folder; a context that ends it."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "server.log"
        for name in (
            "models/diffusion_models",
            "models/loras",
            "custom_nodes",
            "input",
            "output",
            "pages",
        ):
            (folder / name).mkdir(parents=True, exist_ok=True)
        here = Path(__file__).parent
        shutil.copy(here / "comfyui_nodes.py", folder / "custom_nodes")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def __enter__(self) -> Self:
        settings = {
            "--listen": "127.0.0.1",
            "--port": self.port,
            "--base-directory": self.folder,
            "--front-end-root": self.folder / "pages",
            "--database-url": "sqlite:///:memory:",
        }
        words = [str(word) for pair in settings.items() for word in pair]
        command = [
            sys.executable,
            __file__,
            "--serve",
            "--cpu",
            "--fp32-unet",
            "--disable-api-nodes",
            *words,
        ]
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, cwd=os.environ["COMFY"]
        )
        return self

    def wait(self) -> None:
        """Return when the server answers."""
        while True:
            assert self.process.poll() is None, f"the server ended: see {self.log}"
            try:
                self.ask("system_stats")
            except OSError:
                time.sleep(0.5)
            else:
                return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.terminate()
        self.process.wait(30)

    def ask(self, path: str, body: Any = None) -> Any:
        """The server's answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"the server refuses: {error.read().decode()[:400]}") from error

    def latent(self, nodes: Mapping[str, Any]) -> tuple[Tensor, int]:
        """The latent that a workflow saves, and how many keys of LoRAs the server left out."""
        before = self.log.stat().st_size
        number = self.ask("prompt", {"prompt": nodes})["prompt_id"]
        while not (done := self.ask(f"history/{number}")):
            assert self.process.poll() is None, f"the server ended: see {self.log}"
            time.sleep(0.1)
        status = done[number]["status"]
        assert status["status_str"] == "success", str(status["messages"][-1])[:600]
        (saved,) = [output["latents"][0] for output in done[number]["outputs"].values()]
        file = self.folder / "output" / saved["subfolder"] / saved["filename"]
        with self.log.open("rb") as log:
            log.seek(before)
            return load_file(file)["latent_tensor"], log.read().count(b"not loaded")


class Workflow:
    """A workflow's nodes, as the server takes them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}

    def add(self, kind: str, **inputs: Any) -> Link:
        """Add a node; returns the link to its first output."""
        number = str(len(self.nodes) + 1)
        self.nodes[number] = {"class_type": kind, "inputs": inputs}
        return [number, 0]


def workflow_of(row: Row, server: Server) -> Mapping[str, Any]:
    """The nodes of a row, with its files in the server's folders."""
    flow, spec, item = Workflow(), ARCHS[row.name][0], item_of(row.name)
    save_file({"text": item["text"]}, server.folder / "input" / f"{row.name}.safetensors")
    text = flow.add("LoadConditioning", file=f"{row.name}.safetensors")
    for number in range(row.references):
        file = server.folder / "input" / f"{number}.latent"
        tensors = {
            "latent_tensor": reference(number)[None, :, 0],
            "latent_format_version_0": torch.tensor([]),
        }
        save_file(tensors, file)
        saved = flow.add("LoadLatent", latent=file.name)
        text = flow.add("ReferenceLatent", conditioning=text, latent=saved)
    _, frames, height, width = item["latents"].shape
    stride = 16 if spec is FLUX2 else 8
    size = {"width": stride * width, "height": stride * height, "batch_size": 1}
    if spec is WAN:
        latent = flow.add("EmptyHunyuanLatentVideo", length=4 * frames - 3, **size)
    else:
        latent = flow.add(
            "EmptyFlux2LatentImage" if spec is FLUX2 else "EmptySD3LatentImage", **size
        )
    for number, (file, adapter) in enumerate(row.stages):
        model = flow.add(
            "UNETLoader", unet_name=put(file, server, "diffusion_models"), weight_dtype="default"
        )
        if adapter is not None:
            lora = put(adapter, server, "loras")
            model = flow.add("LoraLoaderModelOnly", model=model, lora_name=lora, strength_model=1.0)
        if spec is FLUX2:
            latent = flow.add(
                "SamplerCustomAdvanced",
                noise=flow.add("RandomNoise", noise_seed=SEED),
                guider=flow.add("BasicGuider", model=model, conditioning=text),
                sampler=flow.add("KSamplerSelect", sampler_name="euler"),
                sigmas=flow.add(
                    "Flux2Scheduler", steps=STEPS, width=size["width"], height=size["height"]
                ),
                latent_image=latent,
            )
            continue
        kind = "ModelSamplingSD3" if spec is WAN else "ModelSamplingAuraFlow"
        settings = {
            "model": flow.add(kind, model=model, shift=SHIFTS[spec.name]),
            "steps": STEPS,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            "positive": text,
            "negative": text,
            "latent_image": latent,
        }
        if len(row.stages) == 1:
            latent = flow.add("KSampler", seed=SEED, denoise=1.0, **settings)
            continue
        last = number == len(row.stages) - 1
        first_step, last_step = steps_of(row, number)
        latent = flow.add(
            "KSamplerAdvanced",
            add_noise="disable" if number else "enable",
            noise_seed=SEED,
            start_at_step=first_step,
            end_at_step=last_step,
            return_with_leftover_noise="disable" if last else "enable",
            **settings,
        )
    flow.add("SaveLatent", samples=latent, filename_prefix="row")
    return flow.nodes


def put(file: Path, server: Server, kind: str) -> str:
    """Link a file into one of the server's folders of models, under a name that says which it
    is."""
    name = "-".join(file.relative_to(server.folder.parent).parts)
    target = server.folder / "models" / kind / name
    if not target.exists():
        os.link(file, target)
    return name


def reference(number: int) -> Tensor:
    """Latents [channels, 1, height, width] of a reference image of FLUX.2, each of another size."""
    return torch.randn(128, 1, 4 + 2 * number, 6, generator=torch.Generator().manual_seed(number))


def steps_of(row: Row, stage: int) -> tuple[int, int]:
    """The first step of a stage, and the step after its last."""
    return STEPS * stage // len(row.stages), STEPS * (stage + 1) // len(row.stages)


def sampled(row: Row) -> Tensor:
    """Our latents [channels, frames, height, width] of a row: Euler steps from the server's
    noise."""
    spec, item = ARCHS[row.name][0], item_of(row.name)
    item |= {f"reference.{number}": reference(number) for number in range(row.references)}
    latents = torch.randn(item["latents"].shape, generator=torch.Generator().manual_seed(SEED))
    tokens = latents[0].numel()
    levels = (
        flux2_levels(tokens, STEPS, 0)
        if spec is FLUX2
        else shifted_levels(STEPS, SHIFTS[spec.name])
    )
    for number, (file, adapter) in enumerate(row.stages):
        model = load_ours(row.name, file, adapter and str(adapter))
        for step in range(*steps_of(row, number)):
            level, after = levels[step : step + 2].float()
            with torch.no_grad():
                (velocity,) = model([latents], level[None], [item], GUIDANCE)
            latents = latents + (after - level) * velocity
    return latents


def rows_of(name: str, folder: Path) -> Iterator[Row]:
    """The workflows of a model; each without a LoRA comes before the one with it."""
    base = base_file(folder, name)
    model, lora = written(name, "lora", "official", folder)
    yield Row("fp32", name, [(base, None)])
    yield Row("fp32, LoRA", name, [(base, lora)])
    short = lora.with_stem(f"{lora.stem}-bf16")
    short.unlink(missing_ok=True)
    model.save_adapter(short, form="official", dtype="bf16")
    file = base_file(folder, name, dtype="bf16")
    yield Row("bf16", name, [(file, None)])
    yield Row("bf16, LoRA in bf16", name, [(file, short)])
    for dtype in ("fp32", "bf16", "fp8_scaled"):
        yield Row(f"merged, {dtype}", name, [(merged_file(folder, name, model, dtype), None)])
    if name == "klein":
        yield Row("two references", name, [(base, None)], references=2)
        yield Row("two references, LoRA", name, [(base, lora)], references=2)
    if name == "t2v":
        low = merged_file(folder, name, model, "fp32")
        low_lora = written(name, "rslora", "official", folder)[1]
        yield Row("two experts", name, [(base, None), (low, None)])
        yield Row("two experts, a LoRA each", name, [(base, lora), (low, low_lora)])
    whole = base_file(folder, name, "comfyui" if name == "zimage" else "official")
    files = {"fp8_scaled": base_file(folder, name, dtype="fp8_scaled")}
    files |= {kind: quantized_file(folder, whole, kind) for kind in FORMATS}
    for kind, file in files.items():
        yield Row(kind, name, [(file, None)])
        yield Row(f"{kind}, LoRA", name, [(file, lora)], rounded=True)


def merged_file(folder: Path, name: str, model: Model, dtype: str) -> Path:
    """The whole transformer of a model with an adapter, merged as our exporter does it."""
    target = folder / "merged" / name / dtype
    config = ExportConfig(forms=("official",), dtype=dtype)
    if not target.exists():
        export_merged(model.module, model.spec, target, config, metadata={})
    return next(target.glob("transformer_official/*.safetensors"))


def quantized_file(folder: Path, base: Path, kind: str) -> Path:
    """A base with the matrices of its blocks in one of ComfyUI's formats, as ComfyUI's own classes
    quantize."""
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    tensors = dict[str, Tensor]()
    for key, tensor in load_file(base).items():
        tensors[key] = tensor
        if (
            tensor.ndim == 2
            and ("blocks." in key or "layers." in key)
            and not any(s % 128 for s in tensor.shape)
        ):
            settings = {} if kind == "mxfp8" else {"scale": "recalculate"}
            layout = QUANT_ALGOS[kind]["comfy_tensor_layout"]
            tensors |= QuantizedTensor.from_float(tensor, layout, **settings).state_dict(key)
            mark = bytearray(json.dumps({"format": kind}).encode())
            tensors[f"{key.removesuffix('weight')}comfy_quant"] = torch.frombuffer(
                mark, dtype=torch.uint8
            )
    target = folder / "bases" / base.parts[-4] / kind / base.parts[-2] / base.name
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target)
    return target


def main() -> int:
    """Run the workflows; returns 1 where a latent is not ours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("zimage", "klein", "t2v")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--folder", type=Path, help="where files are kept")
    args = parser.parse_args()
    if "COMFY" not in os.environ:
        parser.error("set COMFY to the folder of a clone of ComfyUI")
    torch.set_num_threads(1)
    formats = import_comfyui(os.environ["COMFY"]).latent_formats
    scales = {"wan": formats.Wan21(), "flux2": formats.Flux2(), "zimage": formats.Flux()}
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="clients-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    faults, plain = 0, torch.zeros(())
    print(
        "| model | files | keys left out | latents apart | by the LoRA |\n|---|---|---:|---:|---:|"
    )
    with Server(Path(tempfile.mkdtemp(prefix="server-", dir=folder))) as server:
        server.wait()
        for name in args.models:
            for row in rows_of(name, folder):
                try:
                    latent, left = server.latent(workflow_of(row, server))
                    latent = scales[ARCHS[name][0].name].process_in(latent)[0]
                    ours = sampled(row)
                    apart = distance(latent.view(ours.shape), ours)
                except Exception:  # noqa: BLE001 - whatever another program raises is a row
                    faults += 1
                    print(
                        f"FAILED {name} {row.label}\n{traceback.format_exc(limit=-3)}", flush=True
                    )
                    continue
                if any(lora for _, lora in row.stages):
                    change = distance(ours, plain)
                else:
                    plain, change = ours, 0.0
                wrong = bool(left) or not apart <= (ROUNDED * change if row.rounded else SAME)
                faults += wrong
                print(
                    f"| {name} | {row.label} | {left} | {apart:.1e} | {change:.1e} "
                    f"|{' NOT SO' * wrong}",
                    flush=True,
                )
    return int(faults > 0)


def serve(words: Sequence[str]) -> None:
    """ComfyUI's own `main.py`, in a process of its own."""
    stand_in_for_sound()
    sys.argv = ["main.py", *words]
    sys.path[:0] = [os.environ["COMFY"]]
    runpy.run_path(str(Path(os.environ["COMFY"]) / "main.py"), run_name="__main__")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(sys.argv[sys.argv.index("--serve") + 1 :])
    else:
        sys.exit(main())

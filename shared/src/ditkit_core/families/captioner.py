"""A vision-language model that writes captions: any that transformers loads as
`image-text-to-text`.

transformers builds the model, reads its files and renders its chat template, which is a program
(Jinja) that it runs in a sandbox. No code of the model's repository is run. A model that does not
fit runs with the layers of its language model streamed: everything else stays on the device, and
each layer is read from its file for each token of a batch, into the same memory.
"""

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from ditkit_core.data.media.image import RgbImage
from ditkit_core.errors import MissingDependency, UserError, given_to_library
from ditkit_core.io.console import say
from ditkit_core.io.memory import is_out_of_memory
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import Streaming
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.frozen import read_config
from ditkit_core.weights.layer_streaming import LayerStreamer, decide, give_back_large_blocks
from ditkit_core.weights.load import first_ten

_REMEDY = "fetch the model again, or name another one"
_MOST_ASPECT = 100
"""Aspect ratio above which processors of images fail or see a line of pixels."""


@contextmanager
def _given_to_transformers(problem: str) -> Iterator[None]:
    """Turn what the library raises into one line, except for a lack of memory, which is not the
    model's fault."""
    try:
        with given_to_library(problem, _REMEDY):
            yield
    except UserError as error:
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None
        raise


@dataclass(frozen=True, kw_only=True)
class CaptionRequest:
    """What a model is shown and asked."""

    images: Sequence[RgbImage]
    """The images before the text, in order."""
    prompt: str

    def __post_init__(self) -> None:
        for height, width, _ in (pixels.shape for pixels in self.images):
            if max(height, width) > _MOST_ASPECT * min(height, width):
                raise UserError(
                    f"an image of {width} x {height} pixels is too long for a model that describes "
                    f"it; crop it"
                )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model wrote."""

    text: str
    """Without the tokens that its tokenizer calls special."""
    is_cut: bool
    """Whether it reached the limit of tokens before its end."""


class Captioner:
    """A vision-language model; its weights are read by `load`."""

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        streaming: Streaming,
        side: int,
        most_tokens: int,
        package: str,
    ):
        """Read the headers of the weights, and decide whether layers are streamed.

        Args:
            folder: Has config.json, .safetensors, tokenizer and processor, as the hub has them.
            side: Longest side in pixels of the images that the model gets; larger ones are reduced.
            most_tokens: Limit of new tokens.
            package: The distribution that has the extra `captions`, for messages.
        """
        config = read_config(folder)  # a folder of something else is named in one line
        self._folder, self._device, self._dtype = folder, device, dtype
        self._side, self._most_tokens, self._package = side, most_tokens, package
        self._source = SafetensorsSource.open(folder)
        count = sum(math.prod(tensor.shape) for tensor in self._source.tensors.values())
        self.needed_bytes = count * dtype.itemsize
        """Bytes of the weights."""
        self.streams, why = decide(streaming, self.needed_bytes, device)
        if self.streams and "quantization_config" in config:
            raise UserError(
                f"{folder} has quantized weights, whose layers cannot be streamed ({why}); "
                f"name the model's unquantized files, or a smaller model"
            )
        how = "read layer by layer for each token of a batch"
        if not self.streams:
            how = "loaded into memory as a whole"
        self.way = f"{how} ({why})"
        """How its weights come into memory, and the reason."""
        self._model: Any = None

    def load(self) -> None:
        """Read the weights onto the device; of a model that is streamed, all but the layers."""
        _ = self._processor  # before the weights: a missing package is found at once
        if self.streams:
            give_back_large_blocks()
            self._model = self._load_streamed()
        else:
            self._model = self._load({"": str(self._device)})
        say(f"captioner: {self.way}")

    @torch.no_grad()
    def answers(self, requests: Sequence[CaptionRequest]) -> list[Answer]:
        """The model's answers, computed as one batch; at each token the likeliest is taken."""
        processor = self._processor
        inputs = self._inputs(requests).to(self._device, dtype=self._dtype)
        with _given_to_transformers(f"{self._folder} cannot answer"):
            tokens = self._model.generate(
                **inputs,
                max_new_tokens=self._most_tokens,
                do_sample=False,
                num_beams=1,
                # The files may set these, which only sampling reads: transformers would warn.
                temperature=None,
                top_p=None,
                top_k=None,
            )
        # Behind the prompt; a decoder next to an encoder begins with one token, often the last one's.
        prompt = 1 if self._model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        tokens = tokens[:, prompt:]
        texts = processor.batch_decode(tokens, skip_special_tokens=True)
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [-1 if ends is None else ends]
        cut = ~torch.isin(tokens, torch.tensor(ends, device=tokens.device)).any(dim=1)
        return [
            Answer(text=text.strip(), is_cut=is_cut)
            for text, is_cut in zip(texts, cut.tolist(), strict=True)
        ]

    def _inputs(self, requests: Sequence[CaptionRequest]) -> Any:
        from PIL import Image

        images = []
        for request in requests:
            pictures = [Image.fromarray(pixels) for pixels in request.images]
            for picture in pictures:
                picture.thumbnail((self._side, self._side))
            images.append(pictures)
        with _given_to_transformers(f"{self._folder}: its processor takes no such images"):
            texts = [self._rendered(request) for request in requests]
            return self._processor(text=texts, images=images, return_tensors="pt", padding=True)

    def _rendered(self, request: CaptionRequest) -> str:
        """A request in the model's chat template; as it is, where the model has none."""
        if not self._has_template:
            return request.prompt
        content: list[dict[str, str]] = [{"type": "image"} for _ in request.images]
        content.append({"type": "text", "text": request.prompt})
        text: str = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return text

    @property
    def _has_template(self) -> bool:
        return self._processor.chat_template is not None

    def check_prompt(self, instruction: str) -> None:
        """Refuse a model without a chat template, such as Florence-2, whose prompts are words of
        its own, if there is no instruction of the user's."""
        if not self._has_template and not instruction:
            raise UserError(
                f"{self._folder} has no chat template, so it does not take a request in words; "
                f"give its own prompt, such as --instruction '<MORE_DETAILED_CAPTION>' for "
                f"Florence-2"
            )

    @cached_property
    def _processor(self) -> Any:
        """Makes tensors of images and texts."""
        with given_to_library(f"{self._folder} has no processor for images and texts", _REMEDY):
            try:
                processor = resolve_name("transformers:AutoProcessor").from_pretrained(
                    str(self._folder), trust_remote_code=False, local_files_only=True
                )
            except ImportError as error:
                if "torchvision" not in str(error).lower():
                    raise
                raise MissingDependency(
                    f"{self._folder}: its processor needs the library torchvision: uv sync --extra "
                    f'captions in a checkout, else uv pip install "{self._package}[captions]"; or '
                    f"name another model"
                ) from error
            if not isinstance(processor, resolve_name("transformers:ProcessorMixin")):
                raise UserError(
                    f"{self._folder} has no processor for images, only a "
                    f"{type(processor).__name__}; {_REMEDY}"
                )
            tokenizer = processor.tokenizer
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            tokenizer.padding_side = "left"  # answers follow at the right
        return processor

    @cached_property
    def _class(self) -> Any:
        return resolve_name("transformers:AutoModelForImageTextToText")

    def _load(self, device_map: Mapping[str, str]) -> Any:
        """The model with its weights on these devices, by the names of modules; those on `disk`
        stay on `meta`."""
        with (
            _given_to_transformers(f"{self._folder} is no model that describes images"),
            tempfile.TemporaryDirectory() as unused,
        ):
            resolve_name("transformers.utils.logging:disable_progress_bar")()
            model, info = self._class.from_pretrained(
                str(self._folder),
                dtype=self._dtype,
                device_map=dict(device_map),
                offload_folder=unused,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        # The library only warns of these, and goes on with random numbers.
        for problem in ("missing_keys", "mismatched_keys"):
            if names := sorted(map(str, info[problem])):
                raise UserError(
                    f"{self._folder} does not fit its config.json: {len(names)} "
                    f"{problem.partition('_')[0]}: {first_ten(names)}; {_REMEDY}"
                )
        model.requires_grad_(False).eval()
        for parameter in model.parameters():
            # On the host they are parts of mapped files. Products of one row depend on where a
            # matrix begins: the last bits would differ from a streamed layer's.
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()
        return model

    def _load_streamed(self) -> Any:
        with (
            _given_to_transformers(f"{self._folder} is no model that describes images"),
            torch.device("meta"),
        ):
            config = resolve_name("transformers:AutoConfig").from_pretrained(
                str(self._folder), trust_remote_code=False, local_files_only=True
            )
            described = self._class.from_config(config, trust_remote_code=False)
        path, layers = _largest_list(described)
        parts = layer_parts(self._source, layers)
        devices = devices_around(described, path, str(self._device))
        model = self._load({**devices, **{f"{path}.{i}": "disk" for i in range(len(layers))}})
        # Of accelerate, which would read each weight by itself, from mapped files.
        resolve_name("accelerate.hooks:remove_hook_from_submodules")(model)
        memory = LayerStreamer(self._source, device=self._device, dtype=self._dtype)
        for layer, mapping in zip(model.get_submodule(path), parts, strict=True):
            _stream(layer, memory, mapping)
        return model


def _stream(
    layer: nn.Module, memory: LayerStreamer, mapping: Mapping[str, tuple[TensorSlice, ...]]
) -> None:
    """Have a layer on `meta` read its weights before each call, and drop them after it."""
    stack = ExitStack()

    def read(module: nn.Module, arguments: object) -> None:
        stack.enter_context(memory.holding(module, mapping))

    def drop(module: nn.Module, arguments: object, output: object) -> None:
        stack.close()

    layer.register_forward_pre_hook(read)
    layer.register_forward_hook(drop, always_call=True)


def _largest_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules with the most weights: the layers of the language model."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        raise UserError("the model has no list of layers to stream; --encode.streaming never")
    return max(lists, key=lambda entry: size(entry[1]))


def layer_parts(
    source: SafetensorsSource, layers: nn.ModuleList
) -> list[dict[str, tuple[TensorSlice, ...]]]:
    """Where the files store the weights of each layer, by the layer's names.

    Files and models differ in what is in front of a layer's number (`language_model.model.layers.`,
    `model.language_model.layers.`), by architecture and by version. Behind it they agree, so the
    one beginning is taken with which all layers are in the files.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
    stored = source.tensors
    first = next(iter(shapes))
    beginnings = {
        match[1] for name in stored if (match := re.fullmatch(rf"(.*\.){re.escape(first)}", name))
    }
    fitting = [
        beginning
        for beginning in sorted(beginnings)
        if all(
            f"{beginning}{name}" in stored and tuple(stored[f"{beginning}{name}"].shape) == shape
            for name, shape in shapes.items()
        )
    ]
    if len(fitting) != 1:
        raise UserError(
            f"{source.path}: its layers cannot be streamed, because their weights have other names "
            f"or shapes in its files; take a device with more memory (--encode.device cpu "
            f"--encode.streaming never), or a smaller model"
        )
    return [
        {name: (TensorSlice(f"{fitting[0]}{index}.{name}"),) for name in layer.state_dict()}
        for index, layer in enumerate(layers)
    ]


def devices_around(model: nn.Module, path: str, device: str) -> dict[str, str]:
    """The device of every module and parameter outside the module at `path`, by name."""
    devices: dict[str, str] = {}
    prefix = ""
    for part in path.split("."):
        module = model.get_submodule(prefix.rstrip("."))
        names = [name for name, _ in module.named_children() if name != part]
        names += [name for name, _ in module.named_parameters(recurse=False)]
        devices |= {f"{prefix}{name}": device for name in names}
        prefix += f"{part}."
    return devices

"""Messages of libraries that users cannot do anything about; hushed for every program that imports
ditkit."""

import logging
from dataclasses import dataclass

_HUSHED = {
    # torchao registers two enums in a way that torch deprecates, at every import of peft or a
    # transformers model.
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    # diffusers looks for tensor classes that torchao has removed; our files do not need them.
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
    # diffusers warns of a VAE's cast to bf16 even where it lists no module that should stay in
    # fp32.
    "diffusers.models.modeling_utils": "that should be kept in float32: []",
    # accelerate, of layers that are streamed.
    "accelerate.big_modeling": "Some parameters are on the meta device",
}
"""By logger, messages of libraries that users cannot do anything about."""


def hush_libraries() -> None:
    """Suppress these messages, but no others of the same loggers."""
    for name, message in _HUSHED.items():
        logging.getLogger(name).addFilter(_Hushed(message))


@dataclass(frozen=True)
class _Hushed(logging.Filter):
    message: str

    def filter(self, record: logging.LogRecord) -> bool:
        return self.message not in record.getMessage()

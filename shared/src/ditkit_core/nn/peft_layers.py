"""peft's layers with our products: classes of a module, because pickle finds a class by its name.

Imported where an adapter is made, and nowhere before: peft costs seconds.
"""

from typing import Any, ClassVar

from peft.tuners.loha.layer import Linear as PeftLoHa
from peft.tuners.lokr.layer import Linear as PeftLoKr
from peft.tuners.lora import Linear as PeftLora
from torch import Tensor, nn

from ditkit_core.nn.factored import Factors, changed, parts_of
from ditkit_core.nn.lora import ASSISTANT, KeepsOnlyItsInput, PlainLora, low_rank_sum


class LoraLinear(PlainLora, PeftLora):
    """Uses our product for one active, unmerged, plain LoRA and leaves every other case to peft."""

    def _alone(self) -> str | None:
        """The name of the only active adapter, if it is unmerged and without a variant."""
        if self.disable_adapters or self.merged_adapters:
            return None
        factors: Any = self._modules["lora_A"]
        names = [name for name in self.active_adapters if name in factors]
        return names[0] if len(names) == 1 and names[0] not in self.lora_variant else None

    def is_plain(self) -> bool:
        """As `PlainLora` says."""
        if (name := self._alone()) is None:
            return False
        dropout = self.lora_dropout[name]
        return not (self.training and isinstance(dropout, nn.Dropout) and dropout.p > 0)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's result, with an assistant where it has one."""
        factors: Any = self._modules["lora_A"]
        if ASSISTANT not in factors:
            return self._adapted(x, *args, **kwargs)
        assert not args and not kwargs
        down: Any = self.lora_A[ASSISTANT]
        up: Any = self.lora_B[ASSISTANT]
        return low_rank_sum(x, down.weight, up.weight, 1.0, self._adapted)

    def _adapted(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = self._alone()
        if args or kwargs or name is None:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        modules: Any = self._modules
        down, up = modules["lora_A"][name].weight, modules["lora_B"][name].weight
        base, dropout = modules["base_layer"], modules["lora_dropout"][name]
        adapted = x if type(dropout) is nn.Identity else dropout(x)
        return low_rank_sum(
            adapted, down, up, self.scaling[name], base if adapted is x else lambda _: base(x)
        )


class FactoredLinear(KeepsOnlyItsInput):
    """Uses our product for the one adapter that there is, and leaves merged and disabled layers to
    peft."""

    method: ClassVar[str]

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's result."""
        if (
            args
            or kwargs
            or self.disable_adapters
            or self.merged
            or list(self.active_adapters) != ["default"]
        ):
            result: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return result
        tensors = parts_of(self, self.method)
        factors = Factors(tuple(tensors), self.scaling["default"])
        return changed(x, list(tensors.values()), factors, self.out_features, self.base_layer)


class LoKrLinear(FactoredLinear, PeftLoKr):
    """A LoKr of a Linear layer."""

    method = "lokr"


class LoHaLinear(FactoredLinear, PeftLoHa):
    """A LoHa of a Linear layer."""

    method = "loha"


FACTORED = {layer.method: layer for layer in (LoKrLinear, LoHaLinear)}
"""By method the class of its layers."""

"""What the tests' dispatch modes have in common."""

from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):
    """A mode that torch does not guard against its compiler: nothing is compiled under it, and the
    guard costs as much as a small operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

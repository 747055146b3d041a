"""The run-time type checker of the test run: beartype, without the two annotations that it cannot check.

A protocol has an instance check only as `runtime_checkable`, and from Python 3.12 on that check does not see the submodules of
an `nn.Module`. `Self` needs the class, and jaxtyping hands over the bare function. Both count as Any here; mypy checks them.
"""

import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(function)` for the annotations that beartype understands.

    jaxtyping hands over two functions that it made from a text: one takes the arguments, and the other, after the call, arguments and
    result. In the second the result is all that is left to check: what the dimensions are called was settled in the first.
    """
    hints = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    takes_result = function.__code__.co_filename == "<string>" and hints.get("return", Any) is not Any
    function.__annotations__ = {"return": hints["return"]} if takes_result else hints
    return beartype(function)


def _checkable(hint: Any) -> Any:
    """The hint, with Any for the parts of it that cannot be checked."""
    if hint is typing.Self or (isinstance(hint, type) and getattr(hint, "_is_protocol", False)):
        return Any
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (None, Annotated, Literal, Callable):
        return hint
    parts = tuple(_checkable(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[parts]  # noqa: UP007 `|` does not take a tuple
    return origin[parts]

"""Triton's interpreter, which runs kernels on a CPU, under every version of NumPy."""

from typing import Any


def repair_interpreter() -> None:
    """Let Triton 3.6 loop to a number that a kernel has computed, under NumPy 2.4 or later: for scripts with `TRITON_INTERPRET=1`.

    That Triton converts an array of one axis to a number, which NumPy 2.4 refuses. Triton 3.7 does not:
    https://github.com/triton-lang/triton/issues/9171. On a GPU nothing is converted so.
    """
    import triton  # not on every system
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch

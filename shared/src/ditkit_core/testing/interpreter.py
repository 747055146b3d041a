"""Triton's interpreter, which runs kernels on a CPU, under every version of NumPy."""

from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Let the interpreter compute what it should: for scripts with `TRITON_INTERPRET=1`.

    It multiplies the bits of bf16 numbers as if they were integers; here it multiplies the numbers,
    in fp32. It cuts fp32 off at bf16, where a GPU rounds to the nearest number: 0.28 % too small on
    average, and the same way each time. And Triton 3.6 cannot loop to a number that a kernel has computed, under NumPy 2.4 or
    later: it converts an array of one axis to a number, which NumPy refuses. Triton 3.7 does not:
    https://github.com/triton-lang/triton/issues/9171. On a GPU nothing is converted so.
    """
    import triton  # not on every system
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_numbers(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return multiply(self, _in_fp32(a), _in_fp32(b), *args)

    interpreter.InterpreterBuilder.create_dot = multiply_numbers
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_rounded(self: Any, x: Any, to: Any) -> Any:
        kinds = (x.dtype.scalar, to.scalar)
        return _in_bf16(x) if kinds == (tl.float32, tl.bfloat16) else cast(self, x, to)

    interpreter.InterpreterBuilder.cast_impl = cast_rounded
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _in_fp32(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _in_bf16(handle: Any) -> Any:
    """The nearest bf16 number, and of two equally near ones the even one."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    bits = handle.data.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40  # a NaN whose bits would carry over
    data = np.where(np.isnan(handle.data), quiet, rounded).astype(np.uint16)
    return TensorHandle(data, tl.bfloat16)


def as_on_hopper() -> None:
    """Let the kernels run as on a Hopper GPU with two multiprocessors from here on: for such
    scripts."""
    from ditkit_core.nn.kernels import hopper

    hopper.is_hopper = lambda x: True
    hopper.multiprocessors = lambda device: 2  # type: ignore[assignment]

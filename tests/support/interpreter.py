"""A process in which Triton's kernels run in its interpreter, on the CPU; tests hand it functions.

TRITON_INTERPRET has to be set before Triton is imported, so it is a process of its own. In a test::

    def largest_difference(rows: int) -> float:           # at module level: it is pickled by name
        ...

    def test_products(interpreter):                        # the fixture `interpreter` of the test file
        assert interpreter(largest_difference, 65) < 1e-6

The interpreter of Triton 3.7 multiplies bf16 matrices as the integers that hold their bits, and truncates where a GPU
rounds to nearest even (https://github.com/triton-lang/triton/issues/11584). `_repair_bf16` mends the three places for
the kernels here, which never add or multiply bf16 elements: they go to fp32 first. The interpreter also replaces the
functions of its language again at each call within a kernel, for 40 % of its time; `_replace_language_once` does not.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

SECONDS = 120.0
"""Until one call is given up; the slowest takes a few seconds."""


@contextmanager
def interpreting() -> Iterator[Callable[..., Any]]:
    """Yield what runs a function with its arguments in the process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as executor:
        yield lambda function, *arguments: executor.submit(function, *arguments).result(SECONDS)


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    _repair_bf16()
    _replace_language_once()


def _replace_language_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return replace(function)
        return interpreter._LangPatchScope()  # with nothing to give back

    interpreter._patch_lang = replace_once


def _repair_bf16() -> None:
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast, convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = torch.from_numpy(np.ascontiguousarray(handle.data))
        return TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)

    def rounded(source: Any, to: Any, otherwise: Callable[[], Any]) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return otherwise()
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), tl.bfloat16)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    InterpreterBuilder.cast_impl = lambda self, x, to: rounded(x, to, lambda: cast(self, x, to))
    InterpreterBuilder.create_fp_to_fp = lambda self, x, to, mode: rounded(x, to, lambda: convert(self, x, to, mode))

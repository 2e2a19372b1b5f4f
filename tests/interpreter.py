"""Triton's interpreter without what it computes again and again to the same result.

Kernels give the same bits as without these changes. They take about a third of the time.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import replace
from typing import Any


def install() -> None:
    """Changes the interpreter of this process, if Triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _index_with_arrays(interpreter)
    _leave_out_checks_without_effect(interpreter)
    _patch_the_language_once_per_launch(interpreter)
    _remember_types(interpreter)
    _remember_shapes(interpreter.tl.core)


def _index_with_arrays(interpreter: Any) -> None:
    """Lets Triton 3.6's interpreter use an array with one element as an index, which NumPy refuses from 2.4 on."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _leave_out_checks_without_effect(interpreter: Any) -> None:
    """Integers are not computed in 64 bits as well: what is asserted of them is left out unless `debug` is set."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once_per_launch(interpreter: Any) -> None:
    """Functions that a kernel calls find the language as patched for the launch, and do not search it again."""
    language = (interpreter.tl, interpreter.tl.core)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[Any] = set()

    @functools.cache
    def modules(function: Any) -> frozenset[Any]:
        return frozenset(x for x in function.__globals__.values() if inspect.ismodule(x) and x in language)

    def patch_lang(function: Any) -> Any:
        if modules(function) <= patched:
            return None
        patched.update(modules(function))
        return patch(function)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **options)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def _remember_types(interpreter: Any) -> None:
    """NumPy's type for one of Triton's is looked up once; that of a block is that of its elements."""
    find, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = get_np_dtype


def _remember_shapes(core: Any) -> None:
    """What a tensor and a block's type hold of their shape is made once for each shape; nothing changes it later."""
    make_block = core.block_type.__init__

    @functools.cache
    def of_tensor(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    # Apart by type, since a size of 2.0 is refused and one of 2 is not.
    @functools.lru_cache(maxsize=None, typed=True)
    def of_block(*sizes: int) -> tuple[Any, Any, str]:
        block = object.__new__(core.block_type)
        make_block(block, core.int32, list(sizes))
        return block.shape, block.numel, str(block.shape)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(*type.shape) if type.is_block() else of_tensor()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        self.element_ty = element_ty
        self.shape, self.numel, name = of_block(*sizes)
        self.name = f"<{name}, {element_ty}>"

    core.tensor.__init__, core.block_type.__init__ = tensor, block_type

"""Triton's interpreter in a third of its time, with the same outcome.

A launch puts what interprets in place of the functions of `triton.language`, and takes it away at its end. So does each
call of one jitted function by another, 15 to a tile, which looks through hundreds of names and finds nothing to do. Ten
operations for one of integers find whether it overflows, which is looked at in debugging only. And each operation makes
a type and a shape for what it puts out, of which there are a few dozen.
"""

from dataclasses import replace
from functools import cache

from triton import language as tl
from triton.runtime import interpreter

_OF_TENSOR = ("handle", "type", "dtype", "shape", "numel")


def quicken():
    """Shorten the interpreter's work in this process, where this Triton is one that works as described."""
    used = ("_LangPatchScope", "_patch_lang", "_get_np_dtype", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in used):
        return
    interpreter._patch_lang = _unless_patched(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
    if all(name in vars(tl.core.tensor(None, tl.int32)) for name in _OF_TENSOR):
        tl.core.block_type.__init__ = _making_each_once(tl.core.block_type.__init__)
        tl.core.tensor.__init__ = _of_type(tl.core.tensor.__init__)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # as Triton's compilers do
        builder.options = replace(builder.options, sanitize_overflow=False)


def _unless_patched(patch):
    """Leave out what the launch has done: its functions are then no longer those of the compiler."""

    @cache
    def seen_by(fn):
        return [lang for lang in (tl, tl.core) if any(v is lang for v in fn.__globals__.values())]

    def patch_lang(fn):
        langs = seen_by(fn)
        if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
            return interpreter._LangPatchScope()
        return patch(fn)

    return patch_lang


def _remembering(find):
    known = {}

    def get_np_dtype(of):
        name = of.scalar.name
        if name not in known:
            known[name] = find(of)
        return known[name]

    return get_np_dtype


def _making_each_once(make):
    """Give blocks of the same elements and shape the attributes of the first one."""
    known = {}

    def block_type(self, element_ty, shape):
        space = getattr(element_ty, "address_space", None)
        key = (element_ty.name, space, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            make(self, element_ty, shape)
            known[key] = {**vars(self), "made": {}}
        vars(self).update(known[key])

    return block_type


def _of_type(make):
    """Give tensors the shape and the number of elements that the first one of their type was given."""
    scalars = {}

    def tensor(self, handle, type):
        made = vars(type).get("made", scalars)
        if not made:
            make(self, handle, type)
            made.update(shape=self.shape, numel=self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made["shape"], made["numel"]

    return tensor

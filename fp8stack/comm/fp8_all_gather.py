"""An all-gather of weights in FP8, which `fsdp.py` gives FSDP2.

Matrices of FP8 layers are gathered as E4M3 blocks, 1.03 bytes an element where bfloat16 takes 2; norms, biases and
embeddings as they are. A rank sends one message of uint8:

    chunk    E4M3 blocks (`kernels/reference/wire.py`) of its shards of matrices, each of which starts a new block
    rest     the bytes of its other shards, filled up to a multiple of 16

Each rank decodes its own message like those of the others, so all compute with the same bits. A decoded element is off
by 2^-4 of itself at most, 2.6 % rms (by 2^-10 of its block's scale where it is below 2^-6 of that); a NaN or infinity
makes its block of 128 NaN. Only the copies that forward and backward see have that error. The optimizer steps shards
that are not touched, so no error adds up over steps. An FP8 layer casts its copy once more, with scales of its own
recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.formats import BLOCK, FLOATS
from fp8stack.kernels.reference.wire import Layout

from .collectives import Handle
from .exchange import pack, unpack
from .transport import all_gather, described, failures_named, observe, verify

_NAME = "all_gather_weights"  # in Statistics
Places = Sequence[tuple[int, int]]  # start and size, of the last dimension


class Allocates:
    """Gives FSDP2 memory for the inputs and outputs of its collectives, as its interfaces for them require."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output."""
        return torch.empty(size, dtype=dtype, device=device)


class Fp8AllGather(Allocates):
    """FSDP2's interface of an all-gather (`torch.distributed.fsdp`'s AllGather), for one module that it shards.

    Two kinds of input are gathered as they are: uint8, as which FSDP2 hands over parameters of different dtypes; and
    weights that it resharded to a smaller group after forward, which were decoded before.

    Args:
        parameters: of the module, in FSDP2's order: elements of a rank's padded shard, and whether they go in FP8.
    """

    def __init__(self, parameters: Sequence[tuple[int, bool]]) -> None:
        self._matrices: list[tuple[int, int]] = []  # start and size in a rank's part of the input
        self._rest: list[tuple[int, int]] = []
        self._numel = 0
        for size, in_fp8 in parameters:
            (self._matrices if in_fp8 else self._rest).append((self._numel, size))
            self._numel += size
        self._whole = len(parameters) == len(self._matrices) == 1
        rounded = [-(-size // BLOCK) * BLOCK for _, size in self._matrices]
        self._staged = self._numel if self._whole else sum(rounded)
        # where the shards lie in the message, one after the other
        sizes, rest = ([size for _, size in each] for each in (self._matrices, self._rest))
        self._blocks = list(zip(accumulate(rounded, initial=0), sizes, strict=False))
        self._bytes = list(zip(accumulate(rest, initial=0), rest, strict=False))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Gather weights. The handle of `async_op` decodes when it is waited for, on the stream that waits."""
        known = input_tensor.numel() == self._numel and input_tensor.dtype in FLOATS
        if not (known and self._matrices):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)  # type: ignore[no-any-return]
        what = described("all-gather of weights", input_tensor)
        verify(lambda: f"{what}, {self._staged} of them in FP8", group)
        start = partial(self._start, output_tensor, input_tensor, group, what, async_op)
        if async_op:
            return _Decoding(output_tensor, start())
        observe(_NAME, output_tensor.device, lambda: start()())
        return None

    def stop(self) -> None:
        """Gather all of them as they are from now on."""
        self._matrices.clear()

    def _start(
        self, output: Tensor, input: Tensor, group: Any, what: str, async_op: bool
    ) -> Callable[[], int]:
        """Send; return a function that waits for the messages and decodes them."""
        # before anything is written, since the input may lie in the output
        message = self._encode(input)
        messages = message.new_empty((group.size(), len(message)))
        with failures_named(what, group):
            work = all_gather(messages.view(-1), message, group=group, async_op=async_op)

        def finish() -> int:
            if work is not None:
                with failures_named(what, group):
                    work.wait()
            self._decode(messages, output)
            return (len(messages) - 1) * len(message)

        return finish

    def _encode(self, input: Tensor) -> Tensor:  # uint8 [bytes of a message]
        matrices, layout = input, Layout(1, self._staged, 1)
        if not self._whole:
            matrices = input.new_zeros(self._staged)
            _copy(input, self._matrices, matrices, self._blocks)
        rest = sum(size for _, size in self._rest)
        nbytes = layout.pitch + -(-rest * input.element_size() // 16) * 16
        message = input.new_empty(nbytes, dtype=torch.uint8)
        pack(matrices, layout, message[: layout.pitch].view(1, -1))
        if rest:
            _copy(input, self._rest, message[layout.pitch :].view(input.dtype), self._bytes)
        return message

    def _decode(self, messages: Tensor, output: Tensor) -> None:
        """Write the weights of all ranks."""
        world = len(messages)
        layout, parts = Layout(world, self._staged, world), output.view(world, -1)
        chunks = messages[:, : layout.pitch].contiguous()
        if self._whole:
            unpack(chunks, output, layout)
            return
        matrices = output.new_empty((world, self._staged))
        unpack(chunks, matrices, layout)
        _copy(matrices, self._blocks, parts, self._matrices)
        if self._rest:
            _copy(messages[:, layout.pitch :].view(output.dtype), self._bytes, parts, self._rest)


def _copy(source: Tensor, pieces: Places, target: Tensor, places: Places) -> None:
    """Copy pieces of the last dimension."""
    torch._foreach_copy_(
        [target.narrow(-1, *place) for place in places],
        [source.narrow(-1, *piece) for piece in pieces],
    )


class _Decoding(Handle):
    """The handle of an all-gather of weights. FSDP2 waits for it on the stream that copies the weights out."""

    def __init__(self, output: Tensor, finish: Callable[[], int]) -> None:
        super().__init__([output])
        self._finish: Callable[[], int] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait and decode; the process group's own timeout is in force, not `timeout`."""
        if self._finish is not None:
            observe(_NAME, self._tensors[0].device, self._finish)
            self._finish = None  # and with it the messages
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        return super().get_future()

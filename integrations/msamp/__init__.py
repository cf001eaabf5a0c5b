"""MS-AMP's names over fp8stack, so that scripts written for MS-AMP run on today's torch. Never installed by itself.

    from fp8stack.integrations.msamp import enable

    enable()  # from here on `import msamp` finds fp8stack's
    import msamp

    model, optimizer = msamp.initialize(model, optimizer, opt_level="O2")

There are the names that MS-AMP's documentation and published examples use; `finder.py` has the table of them. What they
do is fp8stack's: blocks of 128 instead of one scale a tensor, ordinary parameters, sums in float32. docs/migrating.md
says which name of fp8stack replaces which of MS-AMP, and what differs in numbers. Megatron-LM is not covered.
"""

from .finder import enable

__all__ = ["enable"]

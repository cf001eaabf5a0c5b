"""FP8 kernels: `ops` is the way in; one Triton kernel file per topic, with a pure-torch twin in `reference/`.

Import this package as `fp8stack.kernels`. The folder lies at the top of the repository, where a bare `import kernels`
would load a second copy of it, or pass for Hugging Face's package of that name; that import fails instead.
"""

if __name__ != "fp8stack.kernels":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is part of fp8stack: import fp8stack.kernels instead. "
        "(For Hugging Face's `kernels` package, remove fp8stack's repository root from sys.path.)"
    )

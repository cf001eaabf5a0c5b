"""FP8 kernels: `ops` is the way in; one Triton kernel file per topic, with a pure-torch twin in `reference/`.

Import this package as `fp8stack.kernels`. The folder lies at the top of the repository, where a bare `import kernels`
finds it, and would load a second copy, or take it for Hugging Face's package of that name. What is imported then is
empty: transformers, which looks there for that package, finds version 0, which is too old for it, and goes on without.
Whatever else is asked of it is an ImportError.
"""

if __name__ != "fp8stack.kernels":
    __version__ = "0"
    del __path__  # so that importing a module of it asks for this

    def __getattr__(name: str) -> object:
        if name[:2] == "__" and name != "__path__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ImportError(
            f"this folder was imported as {__name__!r}; it is part of fp8stack: import fp8stack.kernels instead. "
            "(For Hugging Face's `kernels` package, remove fp8stack's repository root from sys.path.)"
        )

"""Adapters to training frameworks, each importing its framework only inside its own file.

Import this package as `fp8stack.integrations`. The folder lies at the top of the repository; a bare
`import integrations` would load a second copy of it, and fails instead.
"""

if __name__ != "fp8stack.integrations":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is part of fp8stack: import fp8stack.integrations instead."
    )

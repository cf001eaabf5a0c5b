"""The version of this library, in a module of its own so that every other module can import it."""

__version__ = "0.1.0"

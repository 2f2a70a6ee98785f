"""Errors of the host side."""


class CacheFullError(ValueError):
    """Too few slots or blocks are free now; the message gives the numbers. Nothing was changed.

    It can succeed once another request is released, so a scheduler catches this error and waits.
    """


class CacheCorruptionError(RuntimeError):
    """Bytes of the cache that must not change have changed; the message names request, layer and block."""

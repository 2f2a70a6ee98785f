"""What can run out."""


class CacheFullError(ValueError):
    """No free slot or not enough free blocks now; the message gives the numbers. Nothing was changed.

    Releasing a request may help, so a scheduler catches it and waits.
    """


class CacheCorruptionError(RuntimeError):
    """Bytes of the cache that nobody may write have changed; the message names request, layer and block."""

"""What can run out."""


class CacheFullError(ValueError):
    """No free slot or not enough free blocks now; the message gives the numbers. Nothing was changed.

    Releasing a request may help, so a scheduler catches it and waits.
    """

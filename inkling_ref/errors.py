"""The one exception type for input that a user can correct."""


class InputError(ValueError):
    """A file, shape, dtype, config key, image or message that cannot be used.

    The message is one line: it names the thing and says what was expected. The command line prints that
    line and exits with status 2; Python callers can catch it as a `ValueError`.
    """

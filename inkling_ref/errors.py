"""The one exception type for input that a user can correct."""


class InputError(ValueError):
    """A file, shape, dtype, config key, image or message that cannot be used.

    The message is one line: it names the thing and says what was expected. The command line prints that
    line and exits with status 2; Python callers can catch it as a `ValueError`.
    """


def listed(problems: list[str], most: int = 20, separator: str = "; ") -> str:
    """Of many the first, and how many more: with another model's config every tensor is a problem."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return separator.join(problems[:most] + more)

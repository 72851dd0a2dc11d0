"""Files that are written whole, or not at all, and what can be said of their place before the work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InputError


def check_access(folder: Path) -> None:
    """That files can be put into a folder.

    Raises:
        InputError: they cannot.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written to, expected a folder that can")


def check_file(path: Path, what: str) -> None:
    """That a file can be put there, `what` it will hold: said before the work, not after.

    Raises:
        InputError: it cannot, or something else stands there.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise InputError(f"{path}: {kind}, expected the name of a file for the {what}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{folder}: not found, expected a folder for the {what}")
    check_access(folder)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden name beside `path`, which is moved there if all goes well: nobody meets half a file.

    Raises:
        InputError: what stands there is no file: a move would put one in a device's place.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is there and no regular file, expected the name of a file to write")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.filename == str(partial):  # a name that nobody knows
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)

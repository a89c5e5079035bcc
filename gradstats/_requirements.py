"""Optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradstats.errors import MissingPackageError


@contextmanager
def require(extra: str) -> Iterator[None]:
    """Name the extra to install if an import inside the context fails.

    Raises:
        MissingPackageError: if a package cannot be imported, or lacks what is imported from it.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        raise MissingPackageError(
            f"{package} is needed here but cannot be imported ({error}). Install the extra "
            f"{extra!r}: pip install 'gradstats[{extra}]'"
        ) from error

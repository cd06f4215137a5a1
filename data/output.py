"""Files that a user named for what is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path


def write_output(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write a file whole or not at all, through a link to it; what is no file, such as /dev/stdout, as it is.

    Raises OSError, such as IsADirectoryError for a folder.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as out:
            out.writelines(lines)
        return
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, and moved there when it is complete.
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with scratch.open("w", encoding="utf-8") as out:
            out.writelines(lines)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)

"""Files that a user named for what is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tilewise.data.traffic import write_whole


def write_output(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write a file whole or not at all, through a link to it; what is no file, such as /dev/stdout, as it is.

    Raises OSError, such as IsADirectoryError for a folder.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as out:
            out.writelines(lines)
    else:
        write_whole(target.resolve(), lines)

"""Where tilewise keeps what it is given and what it makes: imported profiles, published models."""

from __future__ import annotations

import os
from pathlib import Path


def home_dir(home: str | os.PathLike[str] | None = None) -> Path:
    """`home` if given, else the environment's TILEWISE_HOME, else `tilewise` in the user's data folder (XDG).

    The folder may not exist yet: whoever writes first makes it.
    """
    if home is not None:
        return Path(home)
    if named := os.environ.get("TILEWISE_HOME"):
        return Path(named)
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "tilewise"

"""Where tilewise keeps what it is given and what it makes: imported profiles, published models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def home_dir(home: str | os.PathLike[str] | None = None) -> Path:
    """`home` if given, else the environment's TILEWISE_HOME, else `tilewise` in the user's data folder (XDG).

    A leading `~` is the user's folder. The folder may not exist yet: whoever writes first makes it.
    """
    if home is None:
        home = os.environ.get("TILEWISE_HOME") or None
    if home is not None:
        return _expanded(home)
    return _expanded(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "tilewise"


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Make the folder, and raise OSError, naming it, where it cannot be made or takes no files."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"{os.fspath(folder)} must be a folder that can be written: {error.strerror or error}") from error


def _expanded(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # a user without a folder: reading finds nothing there, writing is refused by name
        return Path("/nonexistent", *Path(folder).parts[1:])

"""Which bundle serves: published versions under the user's folder, else the shipped one.

<home>/models/<op>/<arch>/versions/<digest>/ holds bundles, and the file `current` beside them names the one in force,
with the ones before it on the lines below. Pointer and bundles are replaced whole, so that a reader sees one or the
other.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from tilewise.data.home import home_dir
from tilewise.errors import InvalidBundleError
from tilewise.models.bundle import MANIFEST, Bundle
from tilewise.models.golden import verify

POINTER = "current"
MAX_HISTORY = 100
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_-]+")

Home = str | os.PathLike[str] | None


def current(op: str, arch: str, home: Home = None) -> Path:
    """The folder of the bundle in force. It may not exist, where none is shipped."""
    lines = history(op, arch, home)
    if lines:
        published = _folder(op, arch, home) / "versions" / lines[0]
        if (published / MANIFEST).is_file():
            return published
    return shipped(op, arch)


def shipped(op: str, arch: str) -> Path:
    """The folder of the bundle that came with the package, whether or not there is one."""
    _folder(op, arch, None)  # checks the names
    return Path(str(resources.files("tilewise"))) / "models" / "fitted" / op / arch


def stamp(op: str, arch: str, home: Home = None) -> tuple[int, ...]:
    """Changes whenever another bundle may have come into force; costs two calls of stat."""
    parts: list[int] = []
    for path in (_folder(op, arch, home) / POINTER, shipped(op, arch) / MANIFEST):
        try:
            found = path.stat()
            parts += [found.st_mtime_ns, found.st_ino, found.st_size]
        except OSError:
            parts += [0, 0, 0]
    return tuple(parts)


def history(op: str, arch: str, home: Home = None) -> list[str]:
    """Digests that were in force, the present one first; empty where nothing usable was published."""
    try:
        lines = (_folder(op, arch, home) / POINTER).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
    return lines if all(_DIGEST.fullmatch(line) for line in lines) else []


def publish(bundle: Bundle, home: Home = None) -> Path:
    """Store a bundle and put it in force. Raises InvalidBundleError, and changes nothing, if it fails its own check."""
    op, arch = bundle.op, bundle.arch.name
    verify(bundle)
    folder = _folder(op, arch, home)
    target = folder / "versions" / bundle.digest
    with _lock(folder):
        if not (target / MANIFEST).is_file():
            bundle.save(target)
        _point(folder, [bundle.digest, *history(op, arch, home)])
    return target


def promote(op: str, arch: str, digest: str, home: Home = None) -> Path:
    """Put a stored version in force, named by its digest or the first digits of it."""
    folder = _folder(op, arch, home)
    with _lock(folder):
        stored = sorted(path for path in (folder / "versions").glob("*") if _DIGEST.fullmatch(path.name))
        found = [path for path in stored if path.name.startswith(digest)] if len(digest) >= 6 else []
        if len(found) != 1:
            known = ", ".join(path.name[:12] for path in stored) or "none"
            raise InvalidBundleError(f"version must name one of {known} by at least 6 digits, got {digest!r}")
        verify(Bundle.load(found[0]))
        _point(folder, [found[0].name, *history(op, arch, home)])
    return found[0]


def rollback(op: str, arch: str, home: Home = None) -> Path:
    """Put the version before the present one in force again; after the first one, the shipped bundle."""
    folder = _folder(op, arch, home)
    with _lock(folder):
        lines = history(op, arch, home)
        if not lines:
            raise InvalidBundleError(f"nothing to roll back: no version of {op} on {arch} was published")
        _point(folder, lines[1:])
    return current(op, arch, home)


def _folder(op: str, arch: str, home: Home) -> Path:
    for name in (op, arch):
        if not _NAME.fullmatch(name):
            raise InvalidBundleError(f"op and arch must be letters, digits, '_' and '-', got {name!r}")
    return home_dir(home) / "models" / op / arch


def _point(folder: Path, lines: list[str]) -> None:
    """Replace the pointer file; a version that is named twice in a row counts once."""
    kept = [line for at, line in enumerate(lines) if at == 0 or line != lines[at - 1]][:MAX_HISTORY]
    handle, name = tempfile.mkstemp(prefix=f".{POINTER}.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as out:
            out.write("".join(f"{line}\n" for line in kept))
            out.flush()
            os.fsync(out.fileno())
        Path(name).chmod(0o644)
        os.replace(name, folder / POINTER)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One writer at a time, across processes where the system has file locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield

"""Make a virtual environment for this checkout, or do nothing when it is already right.

    python3 scripts/setup_env.py FOLDER REQUIREMENT...

FOLDER/stamp keeps what was installed: this checkout's path, its packaging files and the requirements. While that
has not changed, nothing is installed again, and nothing waited for. Set-ups of one checkout wait for each other,
because an editable install writes into the checkout itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - so that an old Python is told, not shown a pip error
        print(f"tilewise needs Python 3.10 or newer, {sys.executable} is {sys.version.split()[0]}.", file=sys.stderr)
        print("Name another one: make PYTHON=/path/to/python3 ...", file=sys.stderr)
        return 1
    env = Path(sys.argv[1])
    requirements = sys.argv[2:]
    packaging = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "setup.py")]
    stamp = hashlib.sha256("\n".join([str(ROOT), sys.version, *requirements, *packaging]).encode()).hexdigest()
    stamp_file = env / "stamp"
    if is_ready(stamp_file, stamp):  # an installation takes the stamp away first
        return 0
    with open(ROOT / ".setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up of this checkout", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(stamp_file, stamp):  # whom this waited for may have made the same one
            return 0
        return install(env, requirements, stamp_file, stamp)


def is_ready(stamp_file: Path, stamp: str) -> bool:
    try:
        return stamp_file.read_text() == stamp
    except OSError:
        return False


def install(env: Path, requirements: list[str], stamp_file: Path, stamp: str) -> int:
    """Create what is missing in `env` and install into it; the stamp is written only after all of it worked."""
    python = env / "bin" / "python"
    stamp_file.unlink(missing_ok=True)
    # An environment of another Python, or one cut short while it was made, is made anew.
    if version_with_pip(python) != sys.version:
        print(f"Making {env} with {sys.executable} ({sys.version.split()[0]})", flush=True)
        if subprocess.call([sys.executable, "-m", "venv", "--clear", str(env)], stdin=subprocess.DEVNULL):
            print(
                "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv", flush=True
            )
            return 1
    print(f"Installing {' '.join(requirements)} into {env}; the first time takes a minute or two", flush=True)
    pip = [str(python), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
    code = subprocess.call([*pip, *requirements], cwd=ROOT, stdin=subprocess.DEVNULL)
    if code == 0:
        stamp_file.write_text(stamp)
    return code


def version_with_pip(python: Path) -> str:
    """The version of this interpreter, or "" when it is missing or has no working pip."""
    if not python.exists():
        return ""
    command = [str(python), "-c", "import pip._internal, sys; print(sys.version)"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

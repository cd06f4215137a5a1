"""Import this where tilewise may not be installed: then the checkout itself becomes the package."""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

if find_spec("tilewise") is None:
    _link = Path(tempfile.mkdtemp()) / "tilewise"
    _link.symlink_to(Path(__file__).resolve().parents[1])
    sys.path.insert(0, str(_link.parent))

#!/usr/bin/env bash
# mypy --strict over the package. The checkers can't follow an editable install whose package is the repository root,
# so they are shown a folder in which `tilewise` is a link to it.  Usage: scripts/check_types.sh [PYTHON]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(realpath -s "$(command -v "${1:-python3}")")  # the folder changes below
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
ln -s "$root" "$folder/tilewise"
cd "$folder"
MYPYPATH=$folder "$python" -m mypy --strict --config-file tilewise/pyproject.toml --cache-dir "$root/.mypy_cache" -p tilewise

"""The ops and the kernels there are. A new op is one folder and one line here; a new kernel is one line here."""

from __future__ import annotations

import functools
import hashlib
import io
import tokenize
from dataclasses import dataclass
from importlib import resources

from tilewise.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op: its name in Config.kernel, and the files that decide what it does and how fast."""

    op: str
    name: str
    sources: tuple[str, ...]  # relative to the package root


OPS: dict[str, str] = {"paged_mqa_logits": "tilewise.kernels.paged_mqa_logits.spec"}

_SM90_SOURCES = ("kernels", "producer", "schedule", "epilogue", "state", "pieces", "resources", "compat", "build")

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("paged_mqa_logits", "gfx950", ("kernels/paged_mqa_logits/gfx950/kernels.py",)),
        Kernel(
            "paged_mqa_logits",
            "sm90",
            tuple(f"kernels/paged_mqa_logits/sm90/{name}.py" for name in _SM90_SOURCES),
        ),
        Kernel("paged_mqa_logits", "portable", ("kernels/paged_mqa_logits/triton_portable.py",)),
    )
}


@functools.cache
def kernel_source_hash(name: str) -> str:
    """Sixteen hex digits over the kernel's source files; comments and layout do not count.

    A timing or a test result names the hash of what ran, and is stale when it differs from this.
    Raises UnsupportedError for a name that is not registered.
    """
    if name not in KERNELS:
        raise UnsupportedError(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")
    digest = hashlib.sha256()
    for source in KERNELS[name].sources:
        text = resources.files("tilewise").joinpath(source).read_text(encoding="utf-8")
        digest.update("\n".join([source, *_code(text), ""]).encode())
    return digest.hexdigest()[:16]


# From Python 3.12 on, an f-string is many tokens; before, it is one.
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def _code(text: str) -> list[str]:
    """The tokens of a source file, the same in every Python, without what a formatter may change: comments, line
    breaks, a last comma."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
    blocks = {tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>", tokenize.NEWLINE: "<newline>"}
    lines = text.splitlines(keepends=True)
    kept: list[str] = []
    open_strings: list[tuple[int, int]] = []  # where f-strings begin that have not ended
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == _FSTRING_START:
            open_strings.append(token.start)
        elif token.type == _FSTRING_END:
            start = open_strings.pop()
            if not open_strings:
                kept.append(_between(lines, start, token.end))
        elif not open_strings and token.type not in skipped:
            if token.string in (")", "]", "}") and kept[-1:] == [","]:
                kept.pop()
            kept.append(blocks.get(token.type, token.string))
    return kept


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one row (counted from 1) and column to another."""
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right]
    return "".join([lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]])

"""What the service is told by its environment. Every variable has the prefix TILEWISE_; docs/service.md lists them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewise.data.home import home_dir
from tilewise.data.records import shorten
from tilewise.errors import TilewiseError

PREFIX = "TILEWISE_"
MIB = 1 << 20


class SettingError(TilewiseError, ValueError):
    """A variable of the environment, or an option of `serve`, has a value that is none."""


def _setting(default: Any, doc: str, *, least: float = 0, most: float = math.inf, allowed: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "least": least, "most": most, "allowed": allowed})


@dataclass(frozen=True)
class Settings:
    """The settings, each with its default."""

    home: Path = field(
        default_factory=home_dir,
        metadata={"doc": "folder of all that the service keeps", "shown": "`~/.local/share/tilewise`"},
    )
    database_url: str = _setting("", "URL of the catalogue; empty is SQLite, `catalogue.db` in the home")
    auth: str = _setting(
        "auto",
        "who may ask: `on` wants tokens, `off` takes everybody, `auto` is off on loopback only",
        allowed=("auto", "on", "off"),
    )
    max_upload_bytes: int = _setting(1024 * MIB, "largest profile file that is taken", least=1)
    max_upload_rows: int = _setting(2_000_000, "most rows in one profile file", least=1)
    max_uploads: int = _setting(2, "uploads checked at once, by each worker; others wait", least=1, most=64)
    rate_limit: float = _setting(5000.0, "requests a second for one token or address, by each worker; 0 is no limit")
    header_timeout_s: float = _setting(10.0, "a request's headers must have come by then", least=0.1)
    body_timeout_s: float = _setting(30.0, "longest silence within a request's body", least=0.1)
    max_connections: int = _setting(
        1000, "open connections of one worker; beyond, the one that waits longest goes", least=8
    )
    jobs: int = _setting(1, "1: this host runs jobs; 0: it only queues them", most=1)
    job_nice: int = _setting(19, "niceness of jobs", most=19)
    job_lease_s: float = _setting(15.0, "a job whose process was silent for so long is taken over", least=1)
    job_attempts: int = _setting(3, "starts of a job whose process dies, before it counts as failed", least=1)
    shadow_requests: int = _setting(1000, "live requests that a candidate must see; a job may say otherwise")
    shadow_timeout_s: float = _setting(3600.0, "a candidate that has not seen them by then is dropped")
    log_format: str = _setting("text", "`text` or `json`, one object a line", allowed=("text", "json"))

    @property
    def url(self) -> str | sa.URL:
        """The catalogue's URL. That of a file is no text, in which `?` and `%` would mean something else."""
        return self.database_url or sa.URL.create("sqlite", database=str(self.home / "catalogue.db"))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, *, home: str | os.PathLike[str] | None = None) -> Settings:
        """The settings of an environment; `home` goes before its variable. Raises SettingError, naming the variable."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {"home": home_dir(home if home is not None else env.get("TILEWISE_HOME") or None)}
        for one in dataclasses.fields(cls):
            text = env.get(PREFIX + one.name.upper(), "").strip()
            if one.name != "home" and text:
                values[one.name] = _parsed(one, text)
        return cls(**values)


def _parsed(one: dataclasses.Field[Any], text: str) -> Any:
    name, allowed = PREFIX + one.name.upper(), one.metadata["allowed"]
    if one.type == "str":
        if allowed and text not in allowed:
            raise SettingError(f"{name} must be one of {', '.join(allowed)}, got {shorten(text)}")
        return text
    least, most = one.metadata["least"], one.metadata["most"]
    try:
        value = int(text) if one.type == "int" else float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or math.isinf(value):
        kind = "a whole number" if one.type == "int" else "a number"
        limit = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise SettingError(f"{name} must be {kind}, {limit}, got {shorten(text)}")
    return value


def settings_table() -> Iterator[tuple[str, str, str]]:
    """Rows (variable, default, meaning) for the documentation."""
    for one in dataclasses.fields(Settings):
        default = f"`{one.default}`" if one.default != "" else ""
        yield PREFIX + one.name.upper(), one.metadata.get("shown", default), one.metadata["doc"]

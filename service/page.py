"""The page at `/`, its files, and its plots. Everything comes from this service; no other host is asked."""

from __future__ import annotations

import asyncio
import subprocess
from collections import OrderedDict
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Response

from tilewise.models import registry
from tilewise.service.files import stored_models
from tilewise.service.parts import Service
from tilewise.service.problems import StrictRoute
from tilewise.service.processes import module_command

FILES = {"app.js": "text/javascript", "style.css": "text/css"}
HEADERS = {
    # Plots carry their style in attributes.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MAX_PLOTS = 64  # kept
DRAW_S = 120.0

Plot = Literal["winners", "m-efficiency", "regret"]


def page_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictRoute)
    folder = resources.files("tilewise.service") / "dashboard"
    kept = {name: (folder / name).read_bytes() for name in ("index.html", *FILES)}
    drawer = Drawer()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(kept["index.html"], media_type="text/html", headers=HEADERS)

    @router.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, "There is no such file")
        return Response(kept[name], media_type=FILES[name], headers=HEADERS)

    @router.get(
        "/v1/plots/{name}", summary="A plot of the model that answers", response_class=Response, tags=["models"],
        responses={200: {"content": {"image/svg+xml": {}}}, 404: {"description": "There is no model to draw"},
                   501: {"description": "matplotlib is not installed"}},
    )  # fmt: skip
    async def plot(
        name: Plot,
        arch: Annotated[str | None, Query(max_length=64, description="GPU; the service's first when left out")] = None,
    ) -> Response:
        """SVG: the winner map, the M-efficiency curve, or the regret by region."""
        selector = service.selectors.selector(arch)
        if selector.bundle is None:
            raise HTTPException(404, selector.problem)
        digest = selector.bundle.digest
        stored = await asyncio.to_thread(lambda: stored_models(service.settings.home).get(digest))
        svg = await drawer.draw(name, digest, stored or registry.shipped(selector.op, selector.arch.name))
        headers = {"ETag": f'"{digest}-{name}"', "Cache-Control": "no-cache"}
        return Response(svg, media_type="image/svg+xml", headers=headers)

    return router


class Drawer:
    """Draws each plot once, in a process of its own: drawing takes a second of processor time."""

    def __init__(self) -> None:
        self._drawn: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._one = asyncio.Lock()

    async def draw(self, name: str, digest: str, folder: Path) -> bytes:
        """The SVG. Raises a 501 where matplotlib is not installed."""
        async with self._one:
            if (name, digest) not in self._drawn:
                self._drawn[name, digest] = await asyncio.to_thread(_draw, name, folder)
                if len(self._drawn) > MAX_PLOTS:
                    self._drawn.popitem(last=False)
            return self._drawn[name, digest]


def _draw(name: str, folder: Path) -> bytes:
    command = module_command("tilewise.service.plots", name, str(folder))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DRAW_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HTTPException(503, "The plot took too long") from error
    if done.returncode == 3:
        raise HTTPException(501, done.stderr.decode().strip())
    if done.returncode:
        raise HTTPException(503, "The plot could not be drawn")
    return done.stdout

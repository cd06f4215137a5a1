"""The page of the service, in a real headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("sqlalchemy")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("playwright")

import playwright.sync_api as playwright
import synthetic
from service_process import ServiceProcess, serving, tilewise

OP, ARCH = synthetic.OP, "h100"  # nothing is shipped for it
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        try:
            made = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"needs Chromium: apt-get install chromium ({str(error).splitlines()[0]})")
        yield made
        made.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    home = tmp_path_factory.mktemp("home")
    synthetic.publish_synthetic(home, shapes=synthetic.SHAPES[:6], arch=ARCH)
    os.environ["TILEWISE_JOB_NICE"] = "0"
    try:
        with serving(home, "--arch", ARCH, "--arch", "mi355x") as running:
            yield running
    finally:
        del os.environ["TILEWISE_JOB_NICE"]


class Page:
    """A page that notes what went wrong, and whom it asked."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.url = url
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *exc: object) -> None:
        self.context.close()
        if exc[0] is None:
            assert self.wrong == []
            assert {url for url in self.asked if not url.startswith((self.url, "data:", "blob:"))} == set()


def says(page: Any, where: str, text: str) -> None:
    """Wait until it does. (The page lets no text be run as code, which other ways of waiting need.)"""
    playwright.expect(page.locator(where)).to_contain_text(text, timeout=WAIT_MS)


@pytest.mark.parametrize(
    "context",
    [
        {"color_scheme": "light", "viewport": {"width": 1200, "height": 900}},
        {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
    ],
    ids=["desk, light", "phone, dark"],
)
def test_the_page_shows_the_model_and_its_plots(browser: Any, service: ServiceProcess, context: Any) -> None:
    with Page(browser, service.url, **context) as page:
        for name in ("winners", "m-efficiency", "regret"):
            page.wait_for_selector(f'.plot[data-plot="{name}"] svg')
        assert service.get("/readyz")["archs"][ARCH]["model_id"] in page.inner_text("#current")
        assert not page.is_visible("#token-form")
        # Nothing is wider than the screen; what is wide scrolls in a box of its own.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        colours = page.evaluate(
            """() => {
            const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number); return r + g + b; };
            const style = (e) => getComputedStyle(e);
            return [light(style(document.body).color), light(style(document.body).backgroundColor),
                    light(style(document.querySelector('.plot svg text')).fill)];
            }"""
        )
        text, back, plotted = colours
        assert abs(text - back) > 400
        assert plotted == text
        assert (back < 200) == (context["color_scheme"] == "dark")


def test_everything_is_reached_by_keyboard(browser: Any, service: ServiceProcess) -> None:
    opened = Page(browser, service.url)
    with opened as page:
        page.wait_for_selector("#current dd")
        reached: list[str] = []
        for _ in range(80):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                """() => { const e = document.activeElement;
                return [e === document.body ? '' : e.id || e.name || e.textContent.trim() || e.className,
                        getComputedStyle(e).outlineStyle]; }"""
            )
            if not name:  # past the last one
                break
            assert outline != "none", name
            reached.append(name)
        assert reached[0] == "To the content"
        assert {"arch", "Now", "batch_size", "Ask", "shadow_requests", "Retrain", "file", "Upload"} <= set(reached)
        page.focus("#ask-form input[name=batch_size]")
        page.keyboard.press("Control+A")
        page.keyboard.type("3")
        page.keyboard.press("Enter")
        page.wait_for_selector("#decision")
        body = {"arch": ARCH, "batch_size": 3, "next_n": 6, "heads": 32, "max_context_len": 32768}
        assert service.get("/v1/select", body)["reason"] in page.inner_text("#decision")
        page.fill("#ask-form input[name=heads]", "33")
        page.keyboard.press("Enter")
        says(page, "#said", "heads")
        opened.wrong.clear()  # the browser itself says that it was refused


def test_every_control_has_a_name(browser: Any, service: ServiceProcess) -> None:
    with Page(browser, service.url) as page:
        page.wait_for_selector("#current dd")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('input, select, button, progress, meter')]
            .filter((e) => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim())
            .map((e) => e.outerHTML)"""
        )
        assert nameless == []
        assert page.get_attribute("html", "lang") == "en"


def test_upload_retrain_compare_promote_and_roll_back(browser: Any, service: ServiceProcess, tmp_path: Path) -> None:
    rows = synthetic.synthetic_rows(synthetic.SHAPES[::4], arch=ARCH)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "latency_us": -1.0, "run_id": "<b>bold</b>"}])))
    with Page(browser, service.url) as page:
        page.wait_for_selector("#current dd")
        before = service.get("/readyz")["archs"][ARCH]["model_id"]
        page.set_input_files("#upload-form input[type=file]", file)
        page.click("#upload-form button")
        page.wait_for_selector("#uploaded li")
        assert f"{len(rows)} rows accepted, 0 repeated, 1 rejected" in page.inner_text("#uploaded")
        assert f"row {len(rows) + 1}: latency_us" in page.inner_text("#uploaded li")

        page.fill("#job-form input[name=shadow_requests]", "0")
        page.uncheck("#job-form input[name=promote]")
        page.click("#job-form button")
        page.wait_for_selector("#job-table >> text=stopped")
        page.click("#job-table >> text=Log")
        says(page, "#log", "candidate")
        page.click("#job-table >> text=Compare")
        page.wait_for_selector("#diff:not([hidden])")
        assert "shapes change" in page.inner_text("#diff-sum")
        candidate = page.inner_text("#diff-of")
        page.click("#promote")
        says(page, "#current", candidate)
        assert service.get("/readyz")["archs"][ARCH]["model_id"] == candidate != before
        page.click("#rollback")
        says(page, "#current", before)
        page.select_option("#arch", "mi355x")
        says(page, "#current", "mi355x")


def test_a_closed_service_asks_for_a_token(browser: Any, tmp_path: Path) -> None:
    token = tilewise("token", "add", "reader", home=tmp_path).stdout.strip()
    os.environ["TILEWISE_AUTH"] = "on"
    try:
        with serving(tmp_path, "--arch", ARCH) as closed:
            opened = Page(browser, closed.url)
            page = opened.page
            page.wait_for_selector("#token-form:not([hidden])")
            opened.wrong.clear()  # the browser itself says that it was refused
            page.fill("#token", token)
            page.click("#token-form button")
            page.wait_for_selector("#job-table >> text=No job of this GPU yet.")
            page.wait_for_selector("#token-form", state="hidden")
            page.fill("#job-form input[name=shadow_requests]", "1")
            page.click("#job-form button")
            says(page, "#said", "scope admin")
            opened.context.close()
    finally:
        del os.environ["TILEWISE_AUTH"]

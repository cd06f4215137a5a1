"""The REST service, asked in-process: its answers are the selector's, and every fault is a problem with its field."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("sklearn")
pytest.importorskip("hypothesis")

import synthetic  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tilewise.dispatch.selector import Selector  # noqa: E402
from tilewise.errors import TilewiseError  # noqa: E402
from tilewise.kernels.arch import ARCHS  # noqa: E402
from tilewise.kernels.paged_mqa_logits import spec  # noqa: E402
from tilewise.server import MODEL_HEADER, create_app  # noqa: E402
from tilewise.service.access import MAX_BODY_BYTES  # noqa: E402

SHAPE = {"batch_size": 16, "next_n": 6, "heads": 32, "max_context_len": 32768}
POSTS = ("/v1/select", "/v1/rank", "/v1/explain")
JSON = {"Content-Type": "application/json"}


class Service:
    """One app and the folder that it reads."""

    def __init__(self, home: Path, arch_names: list[str] | None) -> None:
        self.home = home
        self.app = create_app(home=home, arch_names=arch_names)

    def ask(self, method: str, url: str, **request: Any) -> Any:
        return self.ask_all([(method, url, request)])[0]

    def ask_all(self, requests: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
        async def run() -> list[Any]:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://tilewise") as client:
                return [await client.request(method, url, **request) for method, url, request in requests]

        return asyncio.run(run())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """Serves h200 and mi355x, with a model of synthetic times for the first."""
    home = tmp_path_factory.mktemp("home")
    synthetic.publish_synthetic(home)
    return Service(home, ["h200", "mi355x"])


def check_problem(response: Any, status: int, field: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert response.headers[MODEL_HEADER]
    if field is not None:
        assert field in [error["field"] for error in problem["errors"]], problem
    return problem


# --- answers


GRID = [
    {"batch_size": b, "next_n": n, "heads": h, "block_kv": p, "max_context_len": c, "mean_context_len": m}
    for b in (0, 1, 3, 16, 100)
    for n in (1, 5, 8)
    for h in (32, 128)
    for p in (16, 64)
    for c, m in ((0, None), (2049, None), (32768, 20000), (1 << 20, None))
]


@pytest.mark.parametrize("arch", ["h200", "mi355x"])
def test_service_and_import_decide_alike_over_a_grid(service: Service, arch: str) -> None:
    selector = Selector(arch, home=service.home)
    answers = service.ask_all([("POST", "/v1/select", {"json": {"arch": arch, **sizes}}) for sizes in GRID])
    sources = set()
    for sizes, response in zip(GRID, answers, strict=True):
        shape = spec.Shape(**sizes)
        assert response.status_code == 200, response.text
        decision = selector.select(shape)
        assert response.json() == {"op": synthetic.OP, "arch": arch, "shape": shape.to_dict(), **decision.to_dict()}
        assert response.headers[MODEL_HEADER] == (decision.model_id or "none")
        sources.add(decision.source)
    assert "model" in sources or arch != "h200"


NUMBERS = st.one_of(
    st.integers(-2, 300), st.integers(), st.sampled_from([0, 1, 2, 16, 32, 64, 128, 256, 4096, 1 << 20])
)


@given(
    sizes=st.fixed_dictionaries(
        dict.fromkeys(("batch_size", "next_n", "heads", "max_context_len"), NUMBERS),
        optional={
            "head_dim": NUMBERS,
            "block_kv": NUMBERS,
            "mean_context_len": st.none() | NUMBERS,
            "cache_layout": st.sampled_from(["flat", "preshuffled", "Flat", ""]),
        },
    )
)
@settings(max_examples=200)
def test_service_and_import_agree_on_any_shape(service: Service, sizes: dict[str, Any]) -> None:
    check_same(service, sizes)


def check_same(service: Service, sizes: dict[str, Any]) -> None:
    response = service.ask("POST", "/v1/select", json=sizes)
    try:
        decision = Selector("h200", home=service.home).select(spec.Shape(**sizes))
    except TilewiseError:
        check_problem(response, 422)
    else:
        assert response.status_code == 200
        assert {name: response.json()[name] for name in decision.to_dict()} == decision.to_dict()


VALID = st.fixed_dictionaries(
    {
        "batch_size": st.integers(0, 4096),
        "next_n": st.integers(1, 8),
        "heads": st.sampled_from(spec.HEADS),
        "max_context_len": st.integers(0, 1 << 18),
    },
    optional={"head_dim": st.sampled_from(spec.HEAD_DIMS), "block_kv": st.sampled_from(spec.BLOCK_KVS)},
)


@given(sizes=VALID)
@settings(max_examples=60)
def test_service_and_import_agree_on_valid_shapes(service: Service, sizes: dict[str, Any]) -> None:
    check_same(service, sizes)


def test_rank_and_explain_are_the_selectors(service: Service) -> None:
    selector = Selector("h200", home=service.home)
    shape = spec.Shape(**SHAPE)
    ranked = service.ask("POST", "/v1/rank", json=SHAPE).json()
    assert ranked["ranked"] == [one.to_dict() for one in selector.rank(shape)]
    assert ranked["model_id"] == selector.model_id
    assert ranked["ranked"][0]["config"] == selector.select(shape).config.to_dict()
    explained = service.ask("POST", "/v1/explain", json=SHAPE).json()
    assert explained == {"op": synthetic.OP, **selector.explain(shape).to_dict()}
    assert explained["rejected"]


def test_an_isa_name_stands_for_its_usual_gpu(service: Service) -> None:
    answers = [service.ask("POST", "/v1/select", json={**SHAPE, "arch": arch}).json() for arch in ("h200", "sm90")]
    assert answers[0] == answers[1]
    assert service.ask("POST", "/v1/select", json=SHAPE).json() == answers[0]  # the first one served is the default


def test_every_known_gpu_is_served_where_none_is_named(tmp_path: Path) -> None:
    everything = Service(tmp_path, None)
    ready = everything.ask("GET", "/readyz").json()
    assert list(ready["archs"]) == [name for name in ARCHS if name != "cpu"]
    for arch in ready["archs"]:
        answer = everything.ask("POST", "/v1/select", json={**SHAPE, "arch": arch}).json()
        assert answer["arch"] == arch


def test_the_current_model_has_its_digest_as_etag(service: Service) -> None:
    bundle = Selector("h200", home=service.home).bundle
    assert bundle is not None
    response = service.ask("GET", "/v1/models/current")
    assert response.headers["ETag"] == f'"{bundle.digest}"'
    assert response.json() == {"model_id": bundle.model_id, **bundle.manifest}
    for tag in (f'"{bundle.digest}"', f'W/"{bundle.digest}"', f'"other", "{bundle.digest}"', "*"):
        unchanged = service.ask("GET", "/v1/models/current", headers={"If-None-Match": tag})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert unchanged.headers["ETag"] == f'"{bundle.digest}"'
    changed = service.ask("GET", "/v1/models/current", headers={"If-None-Match": '"other"'})
    assert changed.status_code == 200


def test_a_gpu_without_a_model_has_none_to_show(tmp_path: Path) -> None:
    bare = Service(tmp_path, ["mi350x"])
    check_problem(bare.ask("GET", "/v1/models/current"), 404)
    assert bare.ask("GET", "/readyz").json()["archs"]["mi350x"]["problem"]
    answer = bare.ask("POST", "/v1/select", json=SHAPE)
    assert answer.headers[MODEL_HEADER] == "none"
    assert answer.json()["model_id"] is None


def test_every_answer_carries_the_model(service: Service) -> None:
    for url in ("/healthz", "/readyz", "/v1/models/current", "/nowhere"):
        assert service.ask("GET", url).headers[MODEL_HEADER].startswith("h200-"), url


# --- faults


# F1: each text as the value of each field. None of them is a size that may be asked about.
BAD_VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "1.5",
    "16.0",
    '"16"',
    '"NaN"',
    "true",
    "false",
    "[16]",
    "{}",
]
BAD_VALUES += ["-1", "99999999999", "9" * 5000]
NUMERIC = [name for name in spec.SHAPE_FIELDS if name != "cache_layout"]


@pytest.mark.parametrize("field", NUMERIC)
def test_a_value_that_is_no_size_is_a_422_that_names_it(service: Service, field: str) -> None:
    bodies = [json.dumps({**SHAPE, field: "HERE"}).replace('"HERE"', text) for text in BAD_VALUES]
    if field != "mean_context_len":
        bodies.append(json.dumps({**SHAPE, field: None}))
    for url in POSTS:
        for response in service.ask_all([("POST", url, {"content": body, "headers": JSON}) for body in bodies]):
            problem = check_problem(response, 422, field)
            assert [error["field"] for error in problem["errors"]] == [field]
            assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"heads": 33}, "heads"),
        ({"cache_layout": "tiled"}, "cache_layout"),
        ({"cache_layout": 1}, "cache_layout"),
        ({"op": "other"}, "op"),
        ({"arch": "h900"}, "arch"),
        ({"arch": "cpu"}, "arch"),
        ({"arch": 200}, "arch"),
        ({"arch": "../h200"}, "arch"),
        ({"arch": "x" * 65}, "arch"),
        ({"mean_context_len": 32769}, "mean_context_len"),
    ],
)
def test_a_value_that_is_not_allowed_is_a_422_that_names_it(service: Service, changes: Any, field: str) -> None:
    for url in POSTS:
        check_problem(service.ask("POST", url, json={**SHAPE, **changes}), 422, field)


@pytest.mark.parametrize("field", ["batch_size", "next_n", "heads"])
def test_a_missing_value_is_a_422_that_names_it(service: Service, field: str) -> None:
    body = {name: value for name, value in SHAPE.items() if name != field}
    check_problem(service.ask("POST", "/v1/select", json=body), 422, field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b"\xff",
        b"[" * 60000,
        b'{"batch_size":1,"batch_size":2}',
        b"\0",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_object_is_a_422(service: Service, body: bytes) -> None:
    for url in POSTS:
        check_problem(service.ask("POST", url, content=body, headers=JSON), 422, "body")


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"block_kv": 1}, {"block_kv"}),
        ({"cache_layout": "preshuffled"}, {"cache_layout"}),
        ({"cache_layout": "preshuffled", "block_kv": 1}, {"cache_layout", "block_kv"}),
        ({"arch": "mi355x", "cache_layout": "preshuffled", "block_kv": 1}, {"cache_layout", "block_kv"}),
        ({"heads": 33, "next_n": 9, "arch": "h900"}, {"heads", "next_n", "arch"}),
        ({"arch": "h900", "mean_context_len": 40000}, {"arch", "mean_context_len"}),
        ({"batch_size": "x", "surprise": 1}, {"batch_size", "surprise"}),
    ],
)
def test_every_field_at_fault_is_named_at_once(service: Service, changes: dict[str, Any], fields: set[str]) -> None:
    """Also those that no kernel of the GPU serves, with what it does serve."""
    for url in POSTS:
        problem = check_problem(service.ask("POST", url, json={**SHAPE, **changes}), 422)
        assert {error["field"] for error in problem["errors"]} == fields
        assert all(f"{field}: " in problem["detail"] for field in fields)


def test_what_no_kernel_serves_is_named_with_what_one_does(service: Service) -> None:
    problem = check_problem(service.ask("POST", "/v1/select", json={**SHAPE, "cache_layout": "preshuffled"}), 422)
    (error,) = problem["errors"]
    assert error == {"field": "cache_layout", "message": "must be one of 'flat' on h200, got 'preshuffled'"}


def test_the_context_has_the_default_of_a_shape(service: Service) -> None:
    sizes = {name: value for name, value in SHAPE.items() if name != "max_context_len"}
    answer = service.ask("POST", "/v1/select", json=sizes).json()
    assert answer["shape"] == spec.Shape(**sizes).to_dict()
    fields = service.ask("GET", "/openapi.json").json()["components"]["schemas"]["LaunchRequest"]["properties"]
    for field in dataclasses.fields(spec.Shape):
        if field.default is not dataclasses.MISSING:
            assert fields[field.name].get("default") == field.default, field.name


def test_a_rank_may_be_cut(service: Service) -> None:
    whole = service.ask("POST", "/v1/rank", json=SHAPE).json()["ranked"]
    for limit in (1, 3, len(whole), len(whole) + 1):
        assert service.ask("POST", "/v1/rank", json={**SHAPE, "limit": limit}).json()["ranked"] == whole[:limit]
    for bad in (0, -1, "3", 2.0, True):
        check_problem(service.ask("POST", "/v1/rank", json={**SHAPE, "limit": bad}), 422, "limit")
    check_problem(service.ask("POST", "/v1/select", json={**SHAPE, "limit": 1}), 422, "limit")


def test_wrong_paths_methods_and_media_types_are_problems(service: Service) -> None:
    check_problem(service.ask("GET", "/nowhere"), 404)
    check_problem(service.ask("POST", "/v1/select/", json=SHAPE), 404)
    assert check_problem(service.ask("GET", "/v1/select"), 405)
    assert service.ask("DELETE", "/v1/models/current").headers["Allow"] == "GET"
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        check_problem(service.ask("POST", "/v1/select", content=json.dumps(SHAPE), headers={"Content-Type": kind}), 415)
    check_problem(service.ask("GET", "/v1/models/current?arch=h900"), 422, "arch")


def test_a_body_over_the_limit_is_a_413_with_or_without_its_length(service: Service) -> None:
    """F2: no more than the limit is held, whatever is sent."""
    large = json.dumps({**SHAPE, "arch": "x" * MAX_BODY_BYTES}).encode()
    check_problem(service.ask("POST", "/v1/select", content=large, headers=JSON), 413)
    pulled = 0

    async def endless() -> Any:
        nonlocal pulled
        while True:
            pulled += 1
            yield b" " * 1024

    check_problem(service.ask("POST", "/v1/select", content=endless(), headers=JSON), 413)
    assert pulled <= MAX_BODY_BYTES // 1024 + 2
    padded = json.dumps(SHAPE).ljust(MAX_BODY_BYTES)
    assert service.ask("POST", "/v1/select", content=padded, headers=JSON).status_code == 200


def test_a_failure_of_the_service_is_a_500_that_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Service(tmp_path, ["h200"])

    @broken.app.get("/broken")
    async def fail() -> None:
        raise RuntimeError("secret")

    with caplog.at_level(logging.CRITICAL):
        response = broken.ask("GET", "/broken")
    check_problem(response, 500)
    assert "secret" not in response.text


SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
NAMES = st.sampled_from([*spec.SHAPE_FIELDS, "arch", "op", "surprise"])


@given(body=st.recursive(SCALARS, lambda child: st.lists(child) | st.dictionaries(NAMES, child), max_leaves=12))
@settings(max_examples=200)
def test_any_json_is_answered_without_failing(service: Service, body: Any) -> None:
    for response in service.ask_all([("POST", url, {"content": json.dumps(body), "headers": JSON}) for url in POSTS]):
        if response.status_code != 200:
            check_problem(response, 422)


# --- documentation


def test_openapi_has_examples_that_work_and_problems_for_errors(service: Service) -> None:
    described = service.ask("GET", "/openapi.json").json()
    assert described["info"]["description"].strip()
    assert set(POSTS) < set(described["paths"])
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            assert operation["description"], path
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert list(response["content"]) == ["application/problem+json"], (path, method, status)
    schema = described["components"]["schemas"]["LaunchRequest"]
    assert set(schema["properties"]) == {"op", "arch", *spec.SHAPE_FIELDS}
    assert all(field["description"] for field in schema["properties"].values())
    assert schema["examples"]
    for example in schema["examples"]:
        for url in POSTS:
            assert service.ask("POST", url, json=example).status_code == 200


def test_the_service_page_names_every_route(service: Service) -> None:
    text = (Path(__file__).parent.parent / "docs" / "service.md").read_text()
    for path in service.ask("GET", "/openapi.json").json()["paths"]:
        assert f"`{path}`" in text

"""Errors of the REST service as problem details (RFC 9457)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from tilewise.data.records import shorten
from tilewise.errors import InvalidShapeError, TilewiseError
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS
from tilewise.service.catalogue import CatalogueError

MAX_NAMED = 16  # fields at fault that a problem's text names; a body may hold thousands
PROBLEM = "application/problem+json"
# Documented for every route.
ERRORS = {
    401: "A token is needed",
    403: "The token's scope is too small, or the request is from a page of another host",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is of another media type",
    422: "A value is at fault; `errors` names its field",
    429: "Too many requests; `Retry-After` says when to come again",
    500: "The service failed",
    503: "The catalogue does not answer; selections do",
}

Headers = Callable[[], Mapping[str, str]]  # of every answer that names no GPU


class FieldError(BaseModel):
    """One value at fault."""

    field: str
    message: str


class Problem(BaseModel):
    """Problem details, RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] = []


class FieldProblem(Exception):
    """A 422 about fields that the request model cannot judge, each with a message."""

    def __init__(self, errors: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {message}" for field, message in errors))
        self.errors = errors


def add_problems(
    app: FastAPI, common: Headers, also_wrong: Callable[[object], list[tuple[str, str]]] = lambda body: []
) -> None:
    """Make every error that the app answers with a problem; `common` gives the headers that all answers have.

    `also_wrong` adds, to what the request model finds in a body, the fields at fault that it cannot judge.
    """
    app.router.route_class = StrictRoute
    plain = app.openapi

    def documented() -> dict[str, Any]:
        """FastAPI's own description, but with the media type that errors have."""
        described = plain()
        for path in described["paths"].values():
            for operation in path.values():
                for status, response in operation["responses"].items():
                    if status >= "400":
                        response["content"] = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
        bearer = {"type": "http", "scheme": "bearer", "description": "needed where the service asks for tokens"}
        described["components"]["securitySchemes"] = {"token": bearer}
        described["security"] = [{}, {"token": []}]
        return described

    app.openapi = documented  # type: ignore[method-assign]

    def problem(
        status: int, detail: str, errors: Iterable[tuple[str, str]] = (), headers: Mapping[str, str] | None = None
    ) -> Response:
        return problem_response(status, detail, errors, {**common(), **(headers or {})})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        if any(isinstance(e.get("input"), bytes) for e in error.errors()):  # a body that FastAPI did not take for JSON
            return problem(415, "Content-Type must be application/json")
        found = [field_error(e) for e in error.errors()]
        named = [field for field, _ in found]
        found += [one for one in also_wrong(error.body) if one[0] not in named]
        return problem(422, "; ".join(f"{field}: {message}" for field, message in found[:MAX_NAMED]), found)

    @app.exception_handler(FieldProblem)
    async def invalid_field(request: Request, error: FieldProblem) -> Response:
        return problem(422, str(error), error.errors)

    @app.exception_handler(CatalogueError)
    async def no_catalogue(request: Request, error: CatalogueError) -> Response:
        return problem(503, str(error), headers={"Retry-After": "5"})

    @app.exception_handler(TilewiseError)
    async def refused(request: Request, error: TilewiseError) -> Response:
        # Messages about a shape start with the field's name.
        field, _, message = str(error).partition(" ")
        named = isinstance(error, InvalidShapeError) and field in SHAPE_FIELDS
        return problem(422, str(error), [(field, message)] if named else [])

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # the router knows one route at a time
            headers["Allow"] = ", ".join(_methods(app.openapi()["paths"], request.url.path)) or headers.get("Allow", "")
        return problem(error.status_code, str(error.detail), headers=headers)

    @app.exception_handler(ClientDisconnect)
    async def hung_up(request: Request, error: ClientDisconnect) -> Response:
        return problem(400, "The body broke off")  # for the figures; there is nobody to read it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return problem(500, "The service failed; its log says more")  # uvicorn logs the traceback


def _methods(paths: Mapping[str, Any], path: str) -> list[str]:
    """The methods of the documented path that this one is, the one with the fewest parameters if there are several."""
    found = [
        (template.count("{"), sorted(method.upper() for method in operations))
        for template, operations in paths.items()
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
    ]
    return min(found)[1] if found else []


def field_error(error: Mapping[str, Any]) -> tuple[str, str]:
    """(field, message) of what pydantic reports; the value itself is shown as text, since JSON has no nan."""
    field = ".".join(str(part) for part in error["loc"][1:])
    if error["type"] == "json_invalid":
        return "body", f"must be JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if error["type"] == "missing":
        return field or "body", "must be given"
    if error["type"] == "extra_forbidden":
        return field, "is no field of this request"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ", 1)
    if error["type"] == "model_attributes_type":
        message = "must be a JSON object"
    return field or "body", f"{message}, got {shorten(error.get('input'))}"


def problem_response(
    status: int, detail: str, errors: Iterable[tuple[str, str]] = (), headers: Mapping[str, str] | None = None
) -> Response:
    """An error as problem details, RFC 9457."""
    fields = [FieldError(field=field, message=message) for field, message in errors]
    content = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=fields).model_dump()
    return JSONResponse(content, status, dict(headers or {}), media_type=PROBLEM)


class StrictRoute(APIRoute):
    """A route whose JSON bodies are read as the standard has them, so that each fault can be named."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


class StrictRequest(Request):
    """A request that refuses, as bad JSON, names given twice, text that UTF-8 cannot have and endless nesting."""

    async def json(self) -> Any:
        """The value of the body; json.JSONDecodeError where it has none."""
        body = await self.body()
        try:
            value = json.loads(body.decode(), object_pairs_hook=_unique, parse_int=_int)
            if b"\\u" in body:  # an escape may stand for half a character, which no answer could repeat
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except json.JSONDecodeError:
            raise
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            raise json.JSONDecodeError("Not UTF-8", "", error.start) from error
        except RecursionError as error:
            raise json.JSONDecodeError("Nested too deeply", "", 0) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise json.JSONDecodeError("A name is given twice", "", 0)
    return values


def _int(text: str) -> int | float:
    # Python makes no int of thousands of digits; as infinity, its field is named like any other that is out of range.
    return int(text) if len(text) < 100 else math.inf

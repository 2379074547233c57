"""FastAPI routes that check the key before they read the body, and bound the body before they parse it.

FastAPI itself reads and parses a body, on the event loop, before it calls any dependency.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from lightning_trainer.gateway.auth.access import Access, Needs
from lightning_trainer.gateway.intake.intake import Intake

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class KeyedRoute(APIRoute):
    """A route that needs a key: of a scope that a `Needs` among its dependencies names, otherwise an admin's."""

    def get_route_handler(self) -> Handler:
        """Return the handler of requests."""
        handle = super().get_route_handler()
        scopes = next(_find_needs(self.dependant), Needs("admin")).scopes
        has_body = self.body_field is not None

        async def keyed(request: Request) -> Response:
            access: Access = request.app.state.access
            grant = await access.admit(request.scope, *scopes)
            if has_body:
                intake: Intake = request.app.state.intake
                request = _ReadRequest(request, await intake.records(request.scope, request.receive, grant))
            response = await handle(request)
            response.headers["cache-control"] = "no-store"  # no browser or proxy may cache what needs a key
            return response

        return keyed


class _ReadRequest(Request):
    """A request whose body was read and parsed as JSON, whatever its content type: curl and fetch send others."""

    def __init__(self, request: Request, data: dict[str, Any]) -> None:
        others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
        headers = [*others, (b"content-type", b"application/json")]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._data = data

    async def body(self) -> bytes:
        return b"{}"  # there was one; its content is in `json`

    async def json(self) -> dict[str, Any]:
        return self._data


def _find_needs(dependant: Dependant) -> Iterator[Needs]:
    if isinstance(dependant.call, Needs):
        yield dependant.call
    for inner in dependant.dependencies:
        yield from _find_needs(inner)

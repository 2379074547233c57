"""The server's route for actions. Only a deployer's key opens it: an admin's may be in the hands of a program."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.datastructures import Headers

from lightning_spans.errors import ConfigError
from lightning_spans.schema.json import dumps, to_json
from lightning_spans.store import Store
from lightning_trainer.gateway.auth.access import Needs
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.http.errors import Refusal, forbidden
from lightning_trainer.gateway.intake.route import KeyedRoute
from lightning_trainer.kits.deploy.acting.action import ActionBody, make_transition
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import Note

PATH: Final = "/api/deployments/act"
BY_KEY: Final = "by_key"  # in the details of a transition: id of the deployer's key


class PageRoute(KeyedRoute):
    """A route for the pages of this server alone. The browser says from which site a request comes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            _refuse_other_sites(request.headers)
            return await handle(request)

        return checked


def _refuse_other_sites(headers: Headers) -> None:
    """Reject what a page of another site, or a form, may send.

    Raises:
        Refusal: the content type is not JSON, which other sites cannot send unasked, or the origin is another.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "send the header 'Content-Type: application/json'", code="wrong_content_type")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    own = headers.get("host", "").lower()
    if site not in {"same-origin", "none"} or (origin is not None and urlsplit(origin).netloc.lower() != own):
        raise forbidden(
            f"this request comes from {origin or 'another site'}, and this server is {own}: only its own pages may"
            " change deployments. A proxy in front of it must pass on the header Host"
        )


router: Final = APIRouter(route_class=PageRoute)


@router.post(PATH, name="act on a deployment")
def _act(request: Request, body: ActionBody, grant: Annotated[Grant, Depends(Needs("deployer"))]) -> Response:
    """Make a transition of an agent's policy for the holder of a deployer's key, and return the row."""
    store: Store = request.app.state.store
    history = read_histories(store).get(body.agent, [])
    if not history:
        raise ConfigError(f"{body.agent} has no deployment.")
    if history[-1].number != body.number:
        newest = history[-1]
        raise Refusal(
            409,
            f"not done: {body.agent} was changed meanwhile ({newest.stage.replace('_', ' ')}, by"
            f" {newest.actor or 'somebody'}). Look at the page again",
            code="deployment_changed",
        )
    made = make_transition(store, history, body, Note(body.reason.strip(), grant.holder or "unnamed"))
    made = replace(made, details={**made.details, BY_KEY: grant.key_id})
    keep(store, made)  # the server's store also rejects a promotion that needs an approval and has none
    return Response(dumps({"deployment": to_json(made)}), media_type="application/json")

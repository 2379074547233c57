"""The viewer's pages: a few files in the wheel, served under a security policy that blocks everything else."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import RedirectResponse, Response

from lightning_spans.store.null import NullStore
from lightning_trainer.gateway.app import answer_errors
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.auth.ended_attempts import EndedAttempts
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.auth.quotas import Quotas
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.settings import Limits
from lightning_trainer.kits.view.routes import Views, router

PATH: Final = "/view/"
_FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "app.css": ("app.css", "text/css; charset=utf-8"),
}
HEADERS: Final = {
    # Only this server's own scripts, styles, images, fonts and addresses; no frames around it, no forms.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

pages: Final = APIRouter()  # the files contain no data: without a key, a page asks for one


@pages.get("/view", include_in_schema=False)
def bare() -> Response:
    """Redirect the address without its slash to the page."""
    return RedirectResponse(PATH)


@pages.get("/view/", include_in_schema=False)
def index() -> Response:
    """Return the page."""
    return page("")


@pages.get("/view/{name}", include_in_schema=False)
def page(name: str) -> Response:
    """Return one of the files.

    Raises:
        HTTPException: there is no file of this name.
    """
    if name not in _FILES:
        raise HTTPException(404, "there is no such file: the viewer is at /view/")
    file, kind = _FILES[name]
    content = files("lightning_trainer").joinpath("kits", "view", "static", file).read_bytes()
    return Response(content, media_type=kind, headers=HEADERS)


def add_view(app: FastAPI, views: Views) -> None:
    """Add the viewer to an app that has keys (`app.state.access`)."""
    app.state.views = views
    app.include_router(router)
    app.router.routes.extend(pages.routes)


def create_view(views: Views, keys: Keys) -> FastAPI:
    """Make an app with the viewer only."""
    app = FastAPI(title="Lightning-RL viewer", docs_url=None, redoc_url=None)
    app.state.access = Access(keys, EndedAttempts(NullStore()))
    limits = Limits()
    app.state.intake = Intake(limits, Quotas(limits))
    answer_errors(app)
    add_view(app, views)
    return app

"""The viewer's interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.kits.view.pages import create_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs


class Asked:
    """The viewer's interface, asked with a key."""

    def __init__(self, path: Path, views: Views | None = None) -> None:
        self.keys = Keys.fresh()
        self.app = create_view(views or Views(Runs(path, trusted=True)), self.keys)
        self.client = TestClient(self.app)
        self.name = path.name if views is None else views.runs.all()[0].name

    def __call__(self, what: str, status: int = 200, *, scope: Any = "viewer", **params: Any) -> Any:
        key = self.keys.issue(scope)
        answer = self.client.get(
            f"/api/view/{what}", params={"run": self.name, **params}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, what: str, status: int = 200, *, scope: Any = "viewer", **body: Any) -> Any:
        answer = self.client.post(
            f"/api/view/{what}",
            content=json.dumps({"run": self.name, **body}),
            headers={"Authorization": f"Bearer {self.keys.issue(scope)}"},
        )
        assert answer.status_code == status, answer.text
        return answer.json()

"""Write the OpenAPI description of the viewer's interface, of which `npm run schema` makes the pages' types."""

import json
from pathlib import Path

from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.kits.view.pages import create_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs

described = create_view(Views(Runs()), Keys.fresh()).openapi()
Path("openapi.json").write_text(json.dumps(described))

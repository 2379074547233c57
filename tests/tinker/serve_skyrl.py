"""SkyRL's Tinker server on a CPU: its engine is started by this interpreter, not by `uv run`. For SkyRL 0.4."""

from __future__ import annotations

import json
import sys

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, config_to_argv

MODEL, FOLDER, PORT = sys.argv[1:4]
CONFIG = {
    "max_lora_adapters": 12,
    "max_lora_rank": 8,
    "train_micro_batch_size": 1,
    "sample_max_num_sequences": 8,
}  # fmt: skip - one shape for each length, so that JAX compiles little

api._build_uv_run_cmd_engine = lambda _parent, config: [
    sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config),
]  # fmt: skip
api.app.state.engine_config = EngineConfig(
    base_model=MODEL, backend="jax", backend_config=json.loads(json.dumps(CONFIG)),
    checkpoints_base=f"{FOLDER}/checkpoints", database_url=f"sqlite:///{FOLDER}/tinker.db", session_timeout_sec=30,
    session_cleanup_interval_sec=5,
)  # fmt: skip
uvicorn.run(api.app, host="127.0.0.1", port=int(PORT), log_level="warning")

"""A backend named `plain`: all weights of a transformers model learn in this process, with one optimiser."""

# --8<-- [start:main]
import json
import time

import torch
from own_engine import CopiesKind
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_spans.errors import ConfigError
from lightning_spans.hooks import hookimpl
from lightning_trainer.engines.contract import EngineRequest, HeldModel
from lightning_trainer.models import resolve
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.protocol import Clip, TrainedTokens
from lightning_trainer.rl.losses import token_logprobs
from lightning_trainer.rl.rows import token_weights
from lightning_trainer.run.embedded import EmbeddedBackend


class PlainLearner:
    """`Learner`: takes rows, publishes versions."""

    def __init__(self, config):
        self.config, self.version, folder = config, 0, resolve(config.model)
        self.seen = {}  # what an update saw of each row, for the viewer: nothing
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), config.learning_rate or 1e-6, weight_decay=0.0)
        limit = config.max_model_len or self.model.config.max_position_embeddings
        held = HeldModel(name=folder.name, tokenizer=self.tokenizer, max_model_len=limit)
        self.sampler = CopiesKind().open(EngineRequest(model=folder, seed=config.seed), held)
        self.engines = tuple(self.sampler.engines)
        self.engine = self.engines[0]
        self.publish()

    def publish(self):
        self.sampler.publish({self.engine.model: self.version}, lambda name, folder: self.model.save_pretrained(folder))

    def update(self, rows):
        began, total = time.perf_counter(), 0.0
        weights = token_weights(rows, self.config.loss_aggregation)  # of all rows, also those without gradient
        for row, own in zip(rows, weights, strict=True):
            if row.has_gradient:
                loss = self.loss(row, torch.from_numpy(own))
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.version += 1
        self.publish()
        return {"loss": total, "grad_norm": float(norm), "seconds": time.perf_counter() - began}

    def loss(self, row, weights):
        tokens, mask = torch.from_numpy(row.tokens).long(), torch.from_numpy(row.mask)
        logits = self.model(tokens[None]).logits[0, :-1]
        now = token_logprobs(logits, tokens[1:], row.temperature)[mask[1:]]
        old, advantages = (torch.from_numpy(each[row.mask]).float() for each in (row.logprobs, row.advantages))
        responses = torch.arange(len(row.lengths)).repeat_interleave(torch.tensor(row.lengths))
        clip = Clip(self.config.clip_low, self.config.clip_high, None)
        algorithm = algorithm_by_name(self.config.algorithm)
        return algorithm.policy_loss(TrainedTokens(now, old, advantages, weights, responses), clip).loss

    def save(self, folder, *, resumable=True):
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if resumable:
            torch.save(self.optimiser.state_dict(), folder / "optimiser.pt")
            state = {"version": self.version, "random": self.sampler.random.getstate()}
            (folder / "plain.json").write_text(json.dumps(state))

    def strip(self, folder):
        for name in ("optimiser.pt", "plain.json"):
            (folder / name).unlink(missing_ok=True)

    def load(self, folder):
        self.model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
        self.optimiser.load_state_dict(torch.load(folder / "optimiser.pt", weights_only=True))
        state = json.loads((folder / "plain.json").read_text())
        kind, numbers, gauss = state["random"]
        self.version = state["version"]
        self.sampler.random.setstate((kind, tuple(numbers), gauss))
        self.publish()

    def close(self):
        self.sampler.close()


def check(config):
    """Refuse what this learner does not do, by name."""
    wanted = {
        "kl_coef": 0.0, "entropy_coef": 0.0, "update_epochs": 1, "minibatches": 1, "warmup_steps": 0, "staleness": 0,
        "lora_rank": 0, "lr_schedule": "constant", "agent_weight": {}, "backend_options": {}, "teacher": None,
    }  # fmt: skip
    other = [name for name, value in wanted.items() if getattr(config, name) != value]
    if algorithm_by_name(config.algorithm).critic or config.old_logprobs == "recompute":
        other.append("algorithm or old_logprobs")
    if other:
        raise ConfigError(f"backend = plain does not support {', '.join(other)}. Leave it out, or use backend = torch.")


@hookimpl
def lightning_register_backends(register):
    register("plain", EmbeddedBackend(PlainLearner, check))


# --8<-- [end:main]

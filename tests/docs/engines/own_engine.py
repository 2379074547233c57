"""An engine named `copies`: each version of a policy is a model of its own, sampled token by token."""

# --8<-- [start:main]
import asyncio
import random
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from lightning_spans.errors import ConfigError
from lightning_spans.hooks import hookimpl
from lightning_trainer.gateway.engine import SampledPiece
from lightning_trainer.gateway.prompt.text_stream import TextStream


def load(folder):  # also of an adapter, over the model that its configuration names
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class CopiedPolicy:
    """`Engine`: samples from one policy."""

    def __init__(self, name, held, seeds):
        self.model, self.version, self.weights = name, 0, None
        self.tokenizer, self.max_model_len, self._seeds = held.tokenizer, held.max_model_len, seeds

    async def generate(self, prompt, sampling):
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room")
        weights, version = self.weights, self.version  # the answer ends on the weights that it begins with
        most = min(room, sampling.max_tokens or room)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        drawn = draw(weights, list(prompt), sampling, torch.Generator().manual_seed(seed))
        text, end = TextStream(self.tokenizer, sampling.stop), self.tokenizer.eos_token_id
        for left in reversed(range(most)):
            token, logprob = await asyncio.to_thread(next, drawn)
            new, stopped = ("", True) if token == end else text.push(token)
            if stopped or not left:
                new += "" if stopped and token != end else text.finish()
                yield SampledPiece((token,), (logprob,), new, "stop" if stopped else "length", version=version)
                return
            yield SampledPiece((token,), (logprob,), new, version=version)


@torch.no_grad()
def draw(weights, prompt, sampling, generator):
    """Yield tokens, each with its log-probability before `top_k` and `top_p`."""
    ids, known = torch.tensor([prompt]), None
    while True:
        found = weights(ids, past_key_values=known, use_cache=True)
        scores, known = found.logits[:, -1].float() / (sampling.temperature or 1.0), found.past_key_values
        kept = TopKLogitsWarper(sampling.top_k)(None, scores) if sampling.top_k else scores
        kept = TopPLogitsWarper(sampling.top_p)(None, kept) if sampling.top_p < 1 else kept
        shares = kept.softmax(-1)
        ids = torch.multinomial(shares, 1, generator=generator) if sampling.temperature else shares.argmax(-1, True)
        yield int(ids), float(scores.log_softmax(-1)[0, ids[0, 0]])


class Copies:
    """`PolicyEngines`: samples from every policy of a learner."""

    def __init__(self, request, held):
        self.random = random.Random(request.seed)
        names = [held.name, *request.policies]  # of several adapters, the frozen model first
        self.engines = [CopiedPolicy(name, held, self.random) for name in names]
        if request.policies:
            self.engines[0].weights = load(request.model)

    def still(self):
        return nullcontext()  # the learner changes its own weights, and these are copies

    def publish(self, versions, write):
        for engine in self.engines:
            if engine.model in versions:
                with tempfile.TemporaryDirectory() as folder:
                    write(engine.model, Path(folder))
                    engine.weights = load(folder)
                engine.version = versions[engine.model]

    def logprobs(self, policy, tokens):
        (weights,) = (engine.weights for engine in self.engines if engine.model == policy)
        with torch.no_grad():
            told = weights(torch.tensor([list(tokens)])).logits[0, :-1].float().log_softmax(-1)
        return told.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def close(self):
        for engine in self.engines:
            engine.weights = None


class CopiesKind:
    """`EngineKind`: what `--engine copies` chooses."""

    def check(self, request):
        if request.python or request.urls or request.gpus or request.options:
            raise ConfigError("engine = copies has no options. Leave engine_python, engine_url and the like out.")

    def plan(self, request):
        return [f"engine copies: {1 + len(request.policies)} models in the memory of this process"]

    def open(self, request, held):
        return Copies(request, held)


@hookimpl
def lightning_register_engines(register):
    register("copies", CopiesKind())


# --8<-- [end:main]

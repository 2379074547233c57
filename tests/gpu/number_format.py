"""How far a model's log-probabilities in bfloat16 are from those in float32: the least that two engines differ by.

`python tests/gpu/number_format.py smollm2-135m` samples 64 answers at temperature 1 in bfloat16, and reads them
again in several number formats. The last line is the difference of two engines whose rounding errors are independent.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_trainer import models

TOPICS = ("the sea", "a clock", "rice", "a lost key", "winter", "the number 7", "a fox", "rain")
PROMPTS = (
    "Write a short poem about {}.", "Explain {} to a child.", "What is 12 + 35? Think about {} first.",
    "Write one sentence about {}.", "Name three facts about {}.", "Tell a joke about {}.",
    "Write Python code about {}.", "Translate to French: {} is here.",
)  # fmt: skip
TOKENS, TOGETHER = 48, 16
BINS = ((0, 0.01), (0.01, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 0.99), (0.99, 1.01))


def sample(model, tokenizer):
    """Return prompts and sampled answers, as token ids."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.format(topic)}], tokenize=False, add_generation_prompt=True
        )
        for prompt in PROMPTS
        for topic in TOPICS
    ]
    pairs, end = [], tokenizer.eos_token_id
    for at in range(0, len(texts), TOGETHER):
        batch = tokenizer(texts[at : at + TOGETHER], return_tensors="pt", padding=True, add_special_tokens=False)
        width = batch["input_ids"].shape[1]
        rows = model.generate(**batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=TOKENS)
        for row, mask in zip(rows, batch["attention_mask"], strict=True):
            answer = row[width:].tolist()
            answer = answer[: answer.index(end) + 1] if end in answer else answer
            pairs.append((row[:width][mask.bool()].tolist(), answer))
    return pairs


def pick(logits_TV, prompt, answer):
    places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return torch.log_softmax(logits_TV[places].float(), -1)[range(len(answer)), answer].double()


def read(half, full, pairs, end):
    """Return the log-probabilities of all sampled tokens, by how they were computed."""
    found = {name: [] for name in ("bfloat16", "batched", "head in float32", "logits rounded", "float32")}
    for prompt, answer in pairs:
        tokens = torch.tensor([prompt + answer])
        exact = full.lm_head(full.model(tokens).last_hidden_state[0])
        hidden = half.model(tokens).last_hidden_state[0]
        found["float32"].append(pick(exact, prompt, answer))
        found["logits rounded"].append(pick(exact.bfloat16(), prompt, answer))
        found["bfloat16"].append(pick(half.lm_head(hidden), prompt, answer))
        found["head in float32"].append(pick(full.lm_head(hidden.float()), prompt, answer))
    for at in range(0, len(pairs), TOGETHER):
        some = pairs[at : at + TOGETHER]
        lengths = [len(prompt) + len(answer) for prompt, answer in some]
        tokens = [p + a + [end] * (max(lengths) - n) for (p, a), n in zip(some, lengths, strict=True)]
        mask = [[1] * n + [0] * (max(lengths) - n) for n in lengths]
        logits = half(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits
        found["batched"] += [pick(row, *pair) for row, pair in zip(logits, some, strict=True)]
    return {name: torch.cat(values) for name, values in found.items()}


def main():
    folder = str(models.resolve(sys.argv[1]))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    with torch.inference_mode():
        pairs = sample(half, tokenizer)
        found = read(half, full, pairs, tokenizer.eos_token_id)
    likely = found["float32"].exp()
    bins = [(likely >= low) & (likely < high) for low, high in BINS]
    print(f"{len(pairs)} answers; tokens by probability {BINS}: {[int(chosen.sum()) for chosen in bins]}")

    def show(name, gap):
        print(
            f"{name}: {gap.mean():.4f} nats; by probability", " ".join(f"{gap[chosen].mean():.4f}" for chosen in bins)
        )

    for name, other in (("bfloat16", "float32"), ("batched", "bfloat16"), ("head in float32", "float32"),
                        ("logits rounded", "float32")):  # fmt: skip
        show(f"{name} against {other}", (found[name] - found[other]).abs())
    error, independent = found["bfloat16"] - found["float32"], torch.zeros(len(likely)).double()
    for chosen in bins:
        own = error[chosen]
        if len(own):
            shuffled = [(own - own[torch.randperm(len(own))]).abs() for _ in range(200)]
            independent[chosen] = torch.stack(shuffled).mean(0)
    show("two engines in bfloat16 with independent errors", independent)


if __name__ == "__main__":
    main()

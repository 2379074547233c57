"""The other side of bench_update.py: TRL's GRPOTrainer, in its own environment, takes steps on rows made elsewhere.

    python trl_step.py MODEL ROWS.npz LOGPROBS.npy DTYPE MICRO_BATCH

Everything is TRL's own but the sampling: `_generate_and_score_completions`, where a batch of prompts becomes prompts,
completions, masks and advantages, gives our rows. Writes the log-probabilities of the trained tokens under the model as
loaded, says "ready", then takes one optimiser step for each line that comes in and answers with seconds by the clock,
seconds of CPU and the norm of the gradient.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OUT = sys.stdout
sys.stdout = sys.stderr  # the trainer prints; the answers are ours


def batch_of(rows: np.lib.npyio.NpzFile, pad: int) -> dict[str, torch.Tensor]:
    """Rows as TRL has them: prompts padded on the left, completions on the right, tool results masked out."""
    ends = np.cumsum(rows["lengths"])
    bounds = list(zip(ends - rows["lengths"], ends, strict=True))
    starts = [int(np.argmax(rows["mask"][a:b])) for a, b in bounds]
    width = max(starts), max(b - a - start for (a, b), start in zip(bounds, starts, strict=True))
    shape = {"prompt": (len(bounds), width[0]), "completion": (len(bounds), width[1])}
    batch = {f"{name}_ids": torch.full(size, pad) for name, size in shape.items()}
    batch |= {f"{name}_mask": torch.zeros(size, dtype=torch.long) for name, size in shape.items()}
    batch["tool_mask"] = torch.zeros(shape["completion"], dtype=torch.long)
    for r, ((a, b), start) in enumerate(zip(bounds, starts, strict=True)):
        ids, mask = torch.tensor(rows["tokens"][a:b]).long(), torch.tensor(rows["mask"][a:b]).long()
        batch["prompt_ids"][r, width[0] - start :], batch["prompt_mask"][r, width[0] - start :] = ids[:start], 1
        own = slice(0, len(ids) - start)
        batch["completion_ids"][r, own], batch["completion_mask"][r, own] = ids[start:], 1
        batch["tool_mask"][r, own] = mask[start:]
    batch["advantages"] = torch.tensor(rows["advantages"]).float()
    batch["num_items_in_batch"] = batch["tool_mask"].sum()
    return batch


class FixedRowsTrainer(GRPOTrainer):
    """GRPOTrainer on rows that are given."""

    rows: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs):
        return dict(self.rows)


class Turns(TrainerCallback):
    """Waits for a line before each step, and answers after it."""

    def on_step_begin(self, args, state, control, **kwargs):
        if not sys.stdin.readline():
            control.should_training_stop = True
            sys.exit(0)
        self.begin = time.perf_counter(), time.process_time()

    def on_log(self, args, state, control, logs, **kwargs):
        if "grad_norm" in logs:
            print(*self.taken, float(logs["grad_norm"]), file=OUT, flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        self.taken = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]


def main(model: str, rows_file: str, logprobs_file: str, dtype: str, micro_batch: str) -> None:
    rows, tokenizer = np.load(rows_file), AutoTokenizer.from_pretrained(model)
    count, size = len(rows["lengths"]), int(micro_batch)
    config = GRPOConfig(
        output_dir=f"{rows_file}.out",
        per_device_train_batch_size=size,
        gradient_accumulation_steps=count // size,
        num_generations=8,
        max_steps=1_000,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over tokens, as ours
        temperature=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": dtype},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"prompt": ["?"] * count})
    trainer = FixedRowsTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, dataset, processing_class=tokenizer
    )
    trainer.rows = batch_of(rows, tokenizer.pad_token_id)
    trainer.add_callback(Turns())
    write_logprobs(trainer, logprobs_file)
    print("ready", file=OUT, flush=True)
    trainer.train()


def write_logprobs(trainer: FixedRowsTrainer, file: str) -> None:
    """What an engine would have recorded: so that ratios start at 1, as in a run."""
    rows = trainer.rows
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    with torch.no_grad():
        logprobs = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, rows["completion_ids"].shape[1], batch_size=8
        )[0]
    np.save(file, logprobs[rows["tool_mask"].bool()].float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:6])

"""Our advantages and losses against verl's `core_algos`, on random arrays with general masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")

import torch
from verl.trainer.config import AlgoConfig
from verl.workers.config import FSDPActorConfig

from lightning_trainer.backends.verl.options.describe import compose_options
from lightning_trainer.backends.verl.options.overrides import Site, overrides
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.rl import losses
from lightning_trainer.rl.advantages import generalised_advantages, group_advantages, leave_one_out, whiten

pytestmark = pytest.mark.timeout(300)
SEEDS = range(12)


class Arrays:
    """Rows of one call each: ragged, with holes, in groups of two and more, some of them without contrast."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        rows, tokens = int(random.integers(4, 12)), int(random.integers(3, 17))
        self.mask = random.random((rows, tokens)) < 0.7
        self.mask[np.arange(rows), random.integers(0, tokens, rows)] = True
        self.groups = np.arange(rows) % max(1, rows // int(random.integers(2, 4)))
        random.shuffle(self.groups)
        self.returns = np.where(random.random(rows) < 0.4, random.integers(0, 2, rows), random.normal(size=rows))
        self.returns[self.groups == 0] = 0.5
        self.new, self.old, self.reference = (random.normal(-2, 1, (rows, tokens)) for _ in range(3))
        self.advantages = random.normal(size=(rows, tokens))
        self.values, self.rewards = random.normal(size=(rows, tokens)), random.normal(size=(rows, tokens))
        ends = tokens - 1 - np.argmax(self.mask[:, ::-1], axis=1)
        self.scores = np.zeros((rows, tokens))
        self.scores[np.arange(rows), ends] = self.returns
        self.rows = np.repeat(np.arange(rows)[:, None], tokens, axis=1)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.tensor(getattr(self, name), dtype=torch.float32)

    def flat(self, name: str) -> torch.Tensor:
        return self.tensor(name)[torch.tensor(self.mask)]

    def weights(self, mode: str) -> torch.Tensor:
        """What `rows.token_weights` gives for these rows."""
        lengths = self.mask.sum(1)
        share = {
            "token-mean": np.full(len(lengths), 1.0 / lengths.sum()),
            "seq-mean-token-mean": 1.0 / (len(lengths) * lengths),
            "seq-mean-token-sum": np.full(len(lengths), 1.0 / len(lengths)),
        }[mode]
        return torch.tensor(np.repeat(share, lengths), dtype=torch.float32)


def spread(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return values[:, None] * mask


@pytest.fixture(params=SEEDS)
def arrays(request: pytest.FixtureRequest) -> Arrays:
    return Arrays(request.param)


@pytest.mark.parametrize("normalise", [True, False])
def test_grpo_and_dr_grpo(arrays, normalise):
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        arrays.tensor("scores"), arrays.tensor("mask"), arrays.groups, norm_adv_by_std_in_grpo=normalise
    )
    ours = group_advantages(arrays.returns, arrays.groups, normalise=normalise, eps=1e-6)
    assert spread(ours, arrays.mask) == pytest.approx(theirs.numpy(), abs=1e-4)


def test_rloo(arrays):
    theirs, _ = core_algos.compute_rloo_outcome_advantage(arrays.tensor("scores"), arrays.tensor("mask"), arrays.groups)
    ours = leave_one_out(arrays.returns, range(len(arrays.returns)), arrays.groups)
    assert spread(ours, arrays.mask) == pytest.approx(theirs.numpy(), abs=1e-5)


def test_reinforce_plus_plus(arrays):
    config = AlgoConfig(gamma=1.0)
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        arrays.tensor("scores"), arrays.tensor("mask"), config
    )
    ours = whiten(arrays.returns, arrays.mask.sum(1))
    assert spread(ours, arrays.mask) == pytest.approx(theirs.numpy(), abs=1e-4)


def test_reinforce_plus_plus_with_baseline(arrays):
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        arrays.tensor("scores"), arrays.tensor("mask"), arrays.groups
    )
    centred = group_advantages(arrays.returns, arrays.groups, normalise=False)
    assert spread(whiten(centred, arrays.mask.sum(1)), arrays.mask) == pytest.approx(theirs.numpy(), abs=1e-4)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_generalised_advantages(arrays, gamma, lam):
    mask = arrays.tensor("mask")
    theirs, returns = core_algos.compute_gae_advantage_return(
        arrays.tensor("rewards"), arrays.tensor("values"), mask, gamma, lam
    )
    ours, targets = generalised_advantages(arrays.rewards, arrays.values, arrays.mask, gamma=gamma, lam=lam)
    assert targets[arrays.mask] == pytest.approx(returns[mask > 0].numpy(), abs=1e-4)
    assert whiten(ours[arrays.mask]) == pytest.approx(theirs[mask > 0].numpy(), abs=1e-4)


def actor(low: float, high: float, dual: float = 1e9) -> FSDPActorConfig:
    """verl's configuration of an actor, with nothing but the clip range of interest."""
    return FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=low, clip_ratio_low=low,
        clip_ratio_high=high, clip_ratio_c=dual,
    )  # fmt: skip


LOSSES = {
    "vanilla": lambda a, new, **clip: losses.policy_loss(new, a.flat("old"), a.flat("advantages"), **clip),
    "cispo": lambda a, new, **clip: losses.cispo_loss(new, a.flat("old"), a.flat("advantages"), **clip),
    "gspo": lambda a, new, **clip: losses.gspo_loss(
        new, a.flat("old"), a.flat("advantages"), sequence_T=a.flat("rows"), **clip
    ),
}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.9, 3.0)])
def test_policy_losses_and_their_gradients(arrays, name, mode, low, high):
    theirs_now = arrays.tensor("new").requires_grad_()
    theirs, metrics = core_algos.get_policy_loss_fn(name)(
        arrays.tensor("old"), theirs_now, arrays.tensor("advantages"), arrays.tensor("mask"), mode, actor(low, high)
    )
    theirs.backward()
    ours_now = arrays.flat("new").requires_grad_()
    ours = LOSSES[name](arrays, ours_now, weights_T=arrays.weights(mode), clip_low=low, clip_high=high)
    ours.loss.backward()
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-5)
    assert ours.clipped.float().mean().item() == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-5)
    torch.testing.assert_close(ours_now.grad, theirs_now.grad[torch.tensor(arrays.mask)], rtol=1e-4, atol=1e-6)


def test_the_dual_clip(arrays):
    theirs_now, ours_now = arrays.tensor("new").requires_grad_(), arrays.flat("new").requires_grad_()
    theirs, _ = core_algos.get_policy_loss_fn("vanilla")(
        arrays.tensor("old"), theirs_now, arrays.tensor("advantages"), arrays.tensor("mask"), "token-mean",
        actor(0.2, 0.2, 1.5),
    )  # fmt: skip
    theirs.backward()
    weights = arrays.weights("token-mean")
    ours = losses.policy_loss(
        ours_now, arrays.flat("old"), arrays.flat("advantages"), weights, clip_high=0.2, clip_dual=1.5
    )
    ours.loss.backward()
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(ours_now.grad, theirs_now.grad[torch.tensor(arrays.mask)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "estimator", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "kl+", "abs+", "k3+", "low_var_kl+"]
)
def test_estimators_of_the_divergence(arrays, estimator):
    theirs_now, ours_now = arrays.tensor("new").requires_grad_(), arrays.flat("new").requires_grad_()
    theirs = core_algos.kl_penalty(theirs_now, arrays.tensor("reference"), estimator)
    ours = losses.kl_divergence(ours_now, arrays.flat("reference"), estimator)
    mask = torch.tensor(arrays.mask)
    torch.testing.assert_close(ours, theirs[mask], rtol=1e-4, atol=1e-5)
    theirs[mask].sum().backward()
    ours.sum().backward()
    torch.testing.assert_close(ours_now.grad, theirs_now.grad[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [0.2, 10.0])
def test_value_loss(arrays, clip):
    theirs_now, ours_now = arrays.tensor("new").requires_grad_(), arrays.flat("new").requires_grad_()
    theirs, _ = core_algos.compute_value_loss(
        theirs_now, arrays.tensor("rewards"), arrays.tensor("values"), arrays.tensor("mask"), clip
    )
    ours = losses.value_loss(
        ours_now, arrays.flat("values"), arrays.flat("rewards"), arrays.weights("token-mean"), clip=clip
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)
    theirs.backward()
    ours.backward()
    torch.testing.assert_close(ours_now.grad, theirs_now.grad[torch.tensor(arrays.mask)], rtol=1e-4, atol=1e-6)


def test_the_help_names_the_defaults_of_verls_critic():
    config = TrainConfig(target="a:b", data="d.jsonl", model="m", backend="verl", device="cpu", algorithm="ppo")
    critic = compose_options(overrides(config, Site(folder=Path("run")), None, flash_attention=False)).critic
    help_of = {name: field.description or "" for name, field in TrainConfig.model_fields.items()}
    assert critic.optim.lr == 1e-5
    assert "1e-5 on verl" in help_of["value_learning_rate"]
    assert critic.cliprange_value == 0.5
    assert "0.5 on verl" in help_of["value_clip"]


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy(seed):
    logits = torch.randn(5, 7, 11, generator=torch.Generator().manual_seed(seed)) * 3
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.6
    theirs = core_algos.compute_entropy_loss(logits, mask.float())
    assert losses.entropy(logits[mask]).mean().item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize(("cap", "mask"), [(2.0, None), (None, 1.5), (2.0, 1.5)])
def test_importance_correction(tmp_path, cap, mask):
    """What our options become gives tokens the weights that the torch backend gives them."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    from lightning_trainer.backends.verl.options.describe import compose_options
    from lightning_trainer.backends.verl.options.overrides import Site, overrides
    from lightning_trainer.config.train import TrainConfig

    given = {"importance_cap": cap, "importance_mask": mask}
    config = TrainConfig(target="a:b", data="d.jsonl", model="m", backend="verl", **given)
    values = overrides(config, Site(folder=tmp_path), None, flash_attention=False)
    chosen = RolloutCorrectionConfig(**compose_options(values).algorithm.rollout_correction)
    drawn = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0))
    engine, trainer = -drawn
    all_tokens = torch.ones(3, 7)
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=trainer,
        rollout_log_prob=engine,
        response_mask=all_tokens,
        rollout_is=chosen.rollout_is,
        rollout_is_threshold=chosen.rollout_is_threshold,
        rollout_rs=chosen.rollout_rs,
        rollout_rs_threshold=chosen.rollout_rs_threshold,
    )
    theirs = kept if weights is None else kept * weights.batch["rollout_is_weights"]
    ours = losses.importance_weights((trainer - engine).flatten(), cap=cap, mask=mask)
    assert ours.tolist() == pytest.approx(theirs.flatten().tolist(), rel=1e-6)
    assert mask is None or 0.0 in ours.tolist()

"""A model with product prototypes in the trainer, and the steps that sparse gradients take."""

import dataclasses
import os
import signal

import pytest
import torch
from test_trainer import CONFIG, Trainer, assert_same, config_for, dataset  # noqa: F401
from torch import nn

from attractor import APN
from attractor.config import APNConfig
from attractor.continual.config import UpdateConfig
from attractor.continual.update import LocalUpdate
from attractor.distributed import World
from attractor.hf.sample import set_prototypes
from attractor.loop import clip_gradients, descend, move_rows


def product_config(dataset, **changes):  # noqa: F811
    apn = APNConfig(num_patches=64, top_k=2, rank=2, prototypes="product", sparse_gradients=True)
    config = config_for(dataset, **changes)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, apn=apn))


def adamw(parameter, **options):
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.3, betas=(0.9, 0.95), **options)
    optimizer.register_step_pre_hook(move_rows)
    return optimizer


def sparse(rows, values, like):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, like.shape, check_invariants=True)


def test_rows_that_always_move_move_as_by_adamw():
    torch.manual_seed(0)
    dense = nn.Parameter(torch.randn(5, 2, 3, dtype=torch.float64))
    rows = nn.Parameter(dense.detach().clone())
    optimizers = [adamw(dense), adamw(rows)]
    for _ in range(6):
        dense.grad = torch.randn_like(dense)
        twice = torch.cat([0.25 * dense.grad, 0.75 * dense.grad])  # two pairs of each patch
        rows.grad = sparse([*range(5), *range(5)], twice, rows)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(rows, dense, rtol=0, atol=1e-12)
    kept = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert kept[0].keys() == kept[1].keys()
    torch.testing.assert_close(kept[1], kept[0], rtol=0, atol=1e-12)


def test_other_rows_do_not_move():
    parameter = nn.Parameter(torch.randn(6, 3))
    optimizer = adamw(parameter)
    parameter.grad = sparse([1, 4], torch.randn(2, 3), parameter)
    optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = sparse([4], torch.randn(1, 3), parameter)
    optimizer.step()
    assert (parameter != before).any(1).tolist() == [False, False, False, False, True, False]


def test_what_fills_a_gradient_up_is_not_added(monkeypatch):
    """One row after the other of the same patch is what a GPU adds slowly."""
    added = []
    real = torch.Tensor.coalesce
    monkeypatch.setattr(torch.Tensor, "coalesce", lambda x: (added.append(x._nnz()), real(x))[1])
    values = torch.cat([torch.randn(2, 3), torch.zeros(500, 3)])
    one, other = (nn.Parameter(torch.ones(6, 3)) for _ in range(2))
    optimizers = [adamw(one), adamw(other)]
    for _ in range(2):
        one.grad, other.grad = sparse([1, *[4] * 501], values, one), sparse([1, 4], values[:2], other)
        clip_gradients([one], 1e9)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(one, other)
        assert (one != 1).any(1).tolist() == [False, True, False, False, True, False]
    assert max(added) == 2
    before = one.detach().clone()
    one.grad = sparse([1, 4], torch.tensor([[torch.nan] * 3, [0.0] * 3]), one)  # NaN is not nothing
    optimizers[0].step()
    assert one[1].isnan().all()
    assert torch.equal(one[2:], before[2:])


def test_sparse_gradients_are_clipped_with_the_others():
    torch.manual_seed(0)
    gradients = [torch.randn(4, 3), torch.randn(5)]
    dense = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    mixed = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for most in (0.5, 100.0):
        for parameter, gradient in zip(dense, gradients, strict=True):
            parameter.grad = gradient.clone()
        halves = torch.cat([gradients[0] / 2, gradients[0] / 2])
        mixed[0].grad = sparse([*range(4), *range(4)], halves, gradients[0])
        mixed[1].grad = gradients[1].clone()
        nn.utils.clip_grad_norm_(dense, most)
        clip_gradients(mixed, most)
        for ours, theirs in zip(mixed, dense, strict=True):
            torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_a_step_of_both_kinds():
    bank, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([bank, other], lr=0.1)
    optimizer.register_step_pre_hook(move_rows)
    chosen = nn.functional.embedding(torch.tensor([1]), bank, sparse=True)
    descend(optimizer, [(chosen * other).sum()], 0.1, clip=[bank, other], clip_norm=1.0)
    assert (bank != 1).any(1).tolist() == [False, True, False]
    assert (other != 1).all()


def test_training_learns_and_resumes_to_the_bit(dataset, tmp_path):  # noqa: F811
    config = product_config(dataset, max_steps=12)
    summary = Trainer(config, dataset, tmp_path / "whole").run()
    assert summary["best_val_loss"] < 3.3  # log 27

    def interrupt(record):
        if record["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    assert Trainer(config, dataset, tmp_path / "parts", report=interrupt).run()["interrupted"]
    second = Trainer(config, dataset, tmp_path / "parts")
    assert second.resume()
    second.run()
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_several_processes_are_refused(dataset, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="sparse_gradients=True cannot be averaged over 2 processes"):
        Trainer(product_config(dataset), dataset, tmp_path, world=World(size=2))
    assert CONFIG.model.apn.sparse_gradients is False


def test_patch_local_learning_refuses_what_patches_share():
    layer = APN(8, num_patches=16, top_k=2, rank=2, prototypes="product")
    with pytest.raises(ValueError, match='prototypes="static"'):
        LocalUpdate({0: layer}, UpdateConfig())
    with pytest.raises(ValueError, match="at random"):
        set_prototypes(layer, torch.randn(64, 8), seed=0)

"""Measure the heads of MHA+ during its first training steps."""

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from data.batches import crops, place, spread_windows
from data.corpus import load
from models.lm import LM
from training.device import pick_device, pick_precision
from training.optimizer import learning_rate, optimizer_of, update
from training.pretrained import initial_model

WINDOWS = 16  # number of windows of the training text on which the heads are measured


def watched(cfg: DictConfig, steps: list[int]) -> list[dict]:
    """Train the model that `cfg` describes, without writing a record.

    Returns what is measured after each number of steps in `steps`; 0 is before training.
    """
    device = pick_device(cfg.train.device, "train.device")
    precision, _ = pick_precision(cfg.train.precision, device)
    corpus = load(cfg.data)
    model = initial_model(cfg, len(corpus.vocabulary)).to(device)
    optimizer = optimizer_of(model, cfg.optim)
    ids = place(corpus.training, device)
    windows = spread_windows(corpus.training, cfg.model.context, WINDOWS).long().to(device)
    rows = []
    for step in range(max(steps) + 1):
        if step in steps:
            rows.append({"step": step} | measured(model, windows))
        if step == max(steps):
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.train.steps, cfg.optim)
        batch = (part.to(device) for part in crops(ids, cfg.model.context, cfg.train.batch, cfg.seed, step))
        update(model.loss, optimizer, *batch, device, precision, cfg.train.accumulate, cfg.optim.clip)
    return rows


def measured(model: LM, windows: Tensor) -> dict[str, float]:
    """Return the loss, gradient norms of the first layer, and figures of its heads, on windows [N, context + 1].

    P [N, H, T, T] are the weights before the heads are mixed by M [H, H], and U[t,u] = 1/(t+1) are uniform weights.
    logits: the root mean square of S, the scaled product of Q and K, after its mean over the past is subtracted.
    apart: |P - U| / |U|.
    alike: the mean |correlation| of P - U between two heads.
    outputs alike: the mean linear CKA of two heads' outputs (Kornblith et al. 2019, arXiv 1905.00414), which is 1 if
    they are equal up to a rotation.
    mean passed: the mean over heads h of |sum_g M[h,g]|. If all heads have the weights U, head h outputs sum_g M[h,g]
    times the mean of its V over the past.
    """
    attn, inputs = model.blocks[0].attn, []
    hook = attn.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    model.zero_grad()
    loss = model.loss(windows[:, :-1], windows[:, 1:])
    loss.backward()
    hook.remove()

    def norm(*parameters: Tensor) -> float:
        return nn.utils.get_total_norm([p.grad for p in parameters]).item()

    figures = {
        "loss": loss.item(),
        "gradient of M": norm(attn.mix_weights),
        "gradient of Q and K": norm(attn.Q.weight, attn.K.weight),
        "gradient of V": norm(attn.V.weight),
    }
    model.zero_grad()
    with torch.no_grad():
        x = attn.shift_tokens(inputs[0])
        q, k = attn.rotated_heads(attn.Q(x), attn.K(x))
        S = (q * attn.logit_scale(q)) @ k.mT
        P, v = attn.softmax_weights(S), attn.V(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        past = torch.ones_like(P).tril()
        U, past = past / past.sum(-1, keepdim=True), past.bool()
        logits = S - (S * U).sum(-1, keepdim=True)
        outputs = (attn.weights(S) @ v).transpose(0, 1).flatten(1, 2)  # [H, N * T, D]
        figures |= {
            "logits": logits[past].square().mean().sqrt().item(),
            "apart": ((P - U).norm() / U.norm()).item(),
            "alike": mean_off_diagonal((P - U).transpose(0, 1).flatten(1).corrcoef().abs()),
            "outputs alike": mean_off_diagonal(similarity(outputs)),
            "mean passed": attn.mix_weights.sum(-1).abs().mean().item(),
        }
    return figures


def mean_off_diagonal(matrix: Tensor) -> float:
    """Return the mean of the entries off the diagonal of a matrix [H, H].

    All entries on the diagonal must be 1. A NaN, which comes from a head whose values do not vary, counts as 1.
    """
    H = len(matrix)
    return ((matrix.nan_to_num(1).sum() - H) / (H * (H - 1))).item()


def similarity(outputs: Tensor) -> Tensor:
    """Return the linear CKA of each pair of heads: outputs [H, N, D] -> [H, H]."""
    centred = outputs - outputs.mean(1, keepdim=True)
    products = torch.einsum("gnd,hne->ghde", centred, centred).square().sum((-1, -2))  # |X_g^T X_h|^2
    size = products.diagonal().sqrt()
    return products / size[:, None] / size

"""What the heads of an attention with mixed heads do in its first steps."""

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batches import crops, place, spread_windows
from data.corpus import load
from models.build import build_model
from models.lm import LM
from training.device import pick_device, pick_precision
from training.optimizer import learning_rate, optimizer_of, update

WINDOWS = 16  # of the training text, that is measured on


def watched(cfg: DictConfig, steps: list[int]) -> list[dict]:
    """Train the run that `cfg` describes, and measure its model after each of so many steps."""
    device = pick_device(cfg.train.device)
    precision, _ = pick_precision(cfg.train.precision, device)
    corpus = load(cfg.data)
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, len(corpus.vocabulary)).to(device)
    optimizer = optimizer_of(model, cfg.optim)
    ids = place(corpus.training, device)
    windows = spread_windows(corpus.training, cfg.model.context, WINDOWS).long().to(device)
    found = []
    for step in range(max(steps) + 1):
        if step in steps:
            found.append({"step": step} | measured(model, windows))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.train.steps, cfg.optim)
        batch = (part.to(device) for part in crops(ids, cfg.model.context, cfg.train.batch, cfg.seed, step))
        update(model.loss, optimizer, *batch, device, precision, cfg.train.accumulate, cfg.optim.clip)
    return found


def measured(model: LM, windows: Tensor) -> dict[str, float]:
    """Gradient norms of the first layer, and figures of its heads, on windows [N, context + 1].

    P [N, H, T, T] are the weights of the past before the heads are mixed by M, `apart` how far P is from the mean
    of the past, 1/(t+1), over the size of that mean. `alike` is the mean correlation of two heads' P less that mean,
    without its sign; `outputs alike` the mean of two heads' outputs' linear CKA (Kornblith et al. 2019, arXiv
    1905.00414), 1 where they are the same up to a rotation; `mean passed` is how much of the mean of the past the
    mixed weights hold, the mean of |sum_g M[h,g]| over the heads h.
    """
    attn, seen = model.blocks[0].attn, []
    hook = attn.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    model.zero_grad()
    loss = model.loss(windows[:, :-1], windows[:, 1:])
    loss.backward()
    hook.remove()

    def norm(*parameters: Tensor) -> float:
        return sum(p.grad.square().sum() for p in parameters).sqrt().item()

    found = {
        "loss": loss.item(),
        "gradient of M": norm(attn.mix_weights),
        "gradient of Q and K": norm(attn.Q.weight, attn.K.weight),
        "gradient of V": norm(attn.V.weight),
    }
    model.zero_grad()
    with torch.no_grad():
        x = attn.shift_tokens(seen[0])
        q, k = attn.rotated_heads(attn.Q(x), attn.K(x))
        S = (q * attn.logit_scale(q)) @ k.mT
        P, v = attn.softmax_weights(S), attn.V(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        mean = torch.ones_like(P).tril()
        past, mean = mean.bool(), mean / mean.sum(-1, keepdim=True)
        logits = S - (S * mean).sum(-1, keepdim=True)
        outputs = (attn.weights(S) @ v).transpose(0, 1).flatten(1, 2)  # [H, N * T, D]
        found |= {
            "logits": logits[past].square().mean().sqrt().item(),
            "apart": ((P - mean).norm() / mean.norm()).item(),
            "alike": pairs((P - mean).transpose(0, 1).flatten(1).corrcoef().abs()),
            "outputs alike": pairs(similarity(outputs)),
            "mean passed": attn.mix_weights.sum(-1).abs().mean().item(),
        }
    return found


def pairs(matrix: Tensor) -> float:
    """The mean of what a symmetric matrix holds off its diagonal; 1 for what is the same in all heads."""
    H = len(matrix)
    return ((matrix.nan_to_num(1).sum() - H) / (H * (H - 1))).item()


def similarity(outputs: Tensor) -> Tensor:
    """Linear CKA of each head with each: outputs [H, N, D] -> [H, H]."""
    centred = outputs - outputs.mean(1, keepdim=True)
    products = torch.einsum("gnd,hne->ghde", centred, centred).square().sum((-1, -2))  # |X_g^T X_h|^2
    size = products.diagonal().sqrt()
    return products / size[:, None] / size

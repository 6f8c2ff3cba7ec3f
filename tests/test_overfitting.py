"""Test dropout and early stopping, also in continued runs and with several processes, and which weights are kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import training.trainer
from attn.aft import AFT
from configs.cli import compose
from models.block import PLACEMENTS, ResidualPath
from models.build import build_model
from tests.conftest import TINY
from tests.helpers.runs import Cut, assert_the_same, folder_of, rows_of, torchrun, train_for
from train import train
from training.loading import load_run
from training.optimizer import seed_step
from training.record import Record
from training.sample import PROMPT
from training.trainer import Trainer

IDS = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(0))
DROPOUT = [*TINY, "model.layers=2", "model.dropout=0.5"]


def loss_and_gradient(model: nn.Module, seed: int, loss=None) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    value = (loss or model.loss)(IDS[:, :-1], IDS[:, 1:])
    return value.detach(), torch.autograd.grad(value, model.embed.weight)[0]


# Dropout


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_dropout_sets_a_share_of_the_output_of_a_layer_to_zero(placement):
    path, x, y = ResidualPath(64, placement, 0.25), torch.randn(2, 50, 64), torch.randn(2, 50, 64)
    if placement == "rezero":
        nn.init.constant_(path.a, 0.5)
    torch.manual_seed(0)
    found = path.after(x, y)
    torch.manual_seed(0)
    kept = nn.functional.dropout(torch.ones_like(y), 0.25)
    assert (kept == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(found, ResidualPath.after(path.eval(), x, y * kept))
    assert not torch.allclose(found, path.after(x, y))


def test_the_embedding_has_dropout_only_in_training():
    # With output_scale=0 the blocks add nothing, so that the input of the last norm is the embedding after dropout.
    model = build_model(compose([*TINY, "model.dropout=0.5", "model.output_scale=0"]), 50)
    for trained in (True, False):
        model.train(trained)
        x = []
        hook = model.norm.register_forward_hook(lambda _, inputs, __, x=x: x.append(inputs[0]))
        model(IDS[:, :-1])
        hook.remove()
        assert (x[0] == 0).float().mean() == pytest.approx(0.5 if trained else 0.0, abs=0.05)
        assert torch.equal(x[0], torch.where(x[0] == 0, 0, model.embed(IDS[:, :-1]) * (2 if trained else 1)))


def test_without_dropout_no_random_number_is_drawn():
    model = build_model(compose([*TINY, "model.layers=2", "model.activation_checkpointing=true"]), 50)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_activation_checkpointing_repeats_the_dropout():
    model = build_model(compose(DROPOUT), 50)
    plain = loss_and_gradient(model, 1)
    model.activation_checkpointing = True
    torch.testing.assert_close(loss_and_gradient(model, 1), plain, rtol=0, atol=0)
    assert loss_and_gradient(model, 2)[0] != plain[0]


def test_activation_checkpointing_repeats_the_random_numbers_of_an_attention(monkeypatch):
    monkeypatch.setattr(AFT, "mix", lambda self, x, mix=AFT.mix: F.dropout(mix(self, x), 0.5))
    model = build_model(compose([*TINY, "attn=aft"]), 50)
    plain = loss_and_gradient(model, 1)
    model.activation_checkpointing = True
    torch.testing.assert_close(loss_and_gradient(model, 1), plain, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_compiled_dropout_equals_eager_dropout(checkpointing):
    """The same seed gives the same dropout, and another seed does not.

    The backend is aot_eager for the reason given in tests/test_models.py.
    """
    model = build_model(compose([*DROPOUT, f"model.activation_checkpointing={checkpointing}"]), 50)
    torch._dynamo.reset()
    compiled = torch.compile(model.loss, backend="aot_eager")
    first, again, other = (loss_and_gradient(model, seed, compiled) for seed in (1, 1, 2))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert other[0] != first[0]
    torch.testing.assert_close(first, loss_and_gradient(model, 1))


def test_dropout_depends_on_the_seed_the_step_and_the_process():
    cfg, drawn = compose(DROPOUT), set()
    for seed, step, rank in ((0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        cfg.seed = seed
        seed_step(cfg, step, rank)
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [[], ["train.precision=bf16", "model.activation_checkpointing=true", "train.accumulate=2"]]
)
def test_a_continued_run_has_the_dropout_of_an_uninterrupted_one(given, tiny, tmp_path):
    rest = [a for a in tiny if a.split("=")[0] not in [each.split("=")[0] for each in given]]
    long = [*rest, *given, "model.dropout=0.3", "train.steps=9", "train.log_every=2", "train.checkpoint_seconds=0"]
    whole, cut, without = compose([*long, f"runs={tmp_path}/whole"]), compose(long), compose([*long, "model.dropout=0"])
    train(whole)
    for step in (3, 4):
        train_for(step, cut)
    train(cut)
    assert_the_same(folder_of(cut), folder_of(whole))
    train(without)
    assert Record.of(cut).model.read_bytes() != Record.of(without).model.read_bytes()


@pytest.mark.slow
def test_evaluations_and_samples_have_no_dropout(tiny):
    cfg = compose([*tiny, "model.dropout=0.9", "train.steps=2", "optim.lr=0.01"])
    train(cfg)
    run, (row,) = load_run(folder_of(cfg)), [row for row in rows_of(folder_of(cfg)) if "sample" in row]
    assert run.write(row["sample"][:PROMPT], 3, seed=cfg.seed) == row["sample"]
    evaluation = Record.of(cfg).read_summary()["evaluation"]
    windows = run.text["heldout"][: evaluation["heldout"]["characters"] + 1].unfold(0, 17, 16).long()
    with torch.no_grad():
        loss = run.model.eval().loss(windows[:, :-1], windows[:, 1:])
    assert evaluation["heldout"]["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.slow
def test_two_processes_continue_with_their_own_dropout(tiny, tmp_path):
    """A run that is stopped after three steps and then continued logs the same rows as one that is not stopped.

    A run of a single process logs another loss.
    """
    run = [*tiny, "model.dropout=0.5", "train.steps=6", "train.log_every=1"]
    whole = [*run, f"runs={tmp_path}/whole"]
    assert torchrun(2, "train.py", *whole).returncode == 0
    assert "after step 3 of 6" in torchrun(2, "-m", "tests.helpers.at_step", "1", "3", "term", *run).stdout
    assert torchrun(2, "train.py", *run).returncode == 0
    one, other = (rows_of(folder_of(compose(given))) for given in (run, whole))
    assert one == other
    by_one = compose([*run, f"runs={tmp_path}/by_one"])
    train(by_one)
    assert rows_of(folder_of(by_one))[0]["loss"] != pytest.approx(one[0]["loss"], rel=1e-6)


# Early stopping


LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.0, 10: 0.5, 12: 0.4}  # the held-out loss after each evaluated step


@pytest.fixture
def stopping(tiny, monkeypatch):
    """Make LOSSES the held-out losses. Return overrides of a run that ends after step 8, with step 4 as the best."""
    monkeypatch.setattr(
        Trainer,
        "evaluated",
        lambda trainer: {"heldout_loss": LOSSES[trainer.step], "heldout_perplexity": 9.0, "fit_perplexity": 9.0},
    )
    rest = [a for a in tiny if not a.startswith("train.steps")]
    return [*rest, "train.steps=12", "train.patience=2", "train.checkpoint_seconds=0"]


def weights_at(step: int, cfg) -> dict[str, torch.Tensor]:
    """Train, and return the weights that the model had after `step` steps."""
    found = {}

    def note(trainer):
        if trainer.step == step:
            found.update({name: value.clone() for name, value in trainer.model.state_dict().items()})

    train(cfg, note)
    return found


@pytest.mark.slow
def test_a_run_ends_if_the_held_out_loss_falls_no_further_and_keeps_the_best_weights(stopping, capsys):
    cfg = compose(stopping)
    best = weights_at(4, cfg)
    output, summary = capsys.readouterr().out, Record.of(cfg).read_summary()
    assert "training ends after step 8 of 12: no lower held-out loss in train.patience=2 evaluations\n" in output
    assert "the run keeps the weights of step 4, whose held-out loss is the lowest\n" in output
    assert (summary["status"], summary["steps"], summary["weights_of_step"]) == ("finished", 8, 4)
    assert summary["evaluation"]["heldout_best"]["step"] == 4
    assert [row["step"] for row in Record.of(cfg).rows()] == list(range(1, 9))
    run = load_run(folder_of(cfg))
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, best[name]), name
    again = training.trainer.evaluate(run.model, run.text, 16, 8, torch.device("cpu"))
    assert again["fit"]["loss"] == summary["evaluation"]["fit"]["loss"]


@pytest.mark.slow
def test_a_run_that_reaches_its_last_step_keeps_the_best_weights_too(stopping, capsys):
    cfg = compose([*(a for a in stopping if a != "train.steps=12"), "train.steps=6"])
    best = weights_at(4, cfg)
    assert "training ends" not in capsys.readouterr().out
    assert torch.equal(load_run(folder_of(cfg)).model.embed.weight, best["embed.weight"])
    without = compose([*(a for a in stopping if "patience" not in a)])
    train(without)
    assert (summary := Record.of(without).read_summary())["steps"] == 12
    assert "weights_of_step" not in summary


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(3,), (5,), (5, 2), (7,)])
def test_early_stopping_survives_interruptions(stopping, tmp_path, steps):
    whole, cut = compose([*stopping, f"runs={tmp_path}/whole"]), compose(stopping)
    train(whole)
    for step in steps:
        train_for(step, cut)
    train(cut)
    assert_the_same(folder_of(cut), folder_of(whole))
    assert Record.of(cut).read_summary()["weights_of_step"] == 4


@pytest.mark.slow
def test_a_run_that_had_stopped_early_takes_no_more_steps(stopping, monkeypatch):
    """The run is killed while its best weights are evaluated, and then continued."""
    cfg = compose(stopping)

    def killed(*_):
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(training.trainer, "evaluate", killed)
        with pytest.raises(Cut):
            train(cfg)
    assert Record.of(cfg).read_state()["step"] == 8
    train(cfg, lambda _: pytest.fail("a step was taken"))
    assert Record.of(cfg).read_summary()["weights_of_step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_stop_early_together(parallel, tiny, tmp_path):
    """The held-out loss soon rises, because the learning rate is high. A single process stops at the same step."""
    rest = [a for a in tiny if not a.startswith("train.steps")]
    run = [*rest, "train.steps=40", "train.patience=2", "optim.lr=0.1", "train.log_every=2"]
    done = torchrun(2, "train.py", *run, f"train.parallel={parallel}")
    assert done.returncode == 0, done.stderr
    found = Record.of(compose(run)).read_summary()
    alone = train(compose([*run, f"runs={tmp_path}/alone"]))
    for key in ("steps", "weights_of_step"):
        assert found[key] == alone[key] < 40
    assert found["evaluation"]["heldout"]["loss"] == pytest.approx(alone["evaluation"]["heldout"]["loss"], rel=1e-4)

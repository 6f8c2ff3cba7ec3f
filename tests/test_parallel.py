"""Training in several processes with torchrun, on CPUs with gloo; and what large models need."""

import json
import re
import shutil

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import configs.process
from configs.cli import compose
from configs.folder import composed
from configs.process import give_up
from data.files import UserError
from models.build import build_model
from models.lm import LM
from tests.conftest import TINY, VARIANTS
from tests.helpers.runs import assert_mirrored, folder_of, rows_of, torchrun, train_for
from train import train
from training.distributed import has_unused_parameters
from training.optimizer import update
from training.record import Record
from training.sample import PROMPT
from training.settings import check

pytestmark = pytest.mark.slow

STEPS = ["model.layers=2", "train.batch=8", "train.steps=8", "train.log_every=2", "evaluation.every=4"]
STEPS += ["train.checkpoint_seconds=0"]  # a state at every logged step but the last
STEPS += ["evaluation.sample=20"]  # characters: more than the context
STEPS += ["optim.clip=0.5"]  # less than the norm of the gradient


@pytest.fixture
def run(tiny):
    return [*(a for a in tiny if a.split("=")[0] not in [s.split("=")[0] for s in STEPS]), *STEPS]


def same_numbers(rows: list[dict], others: list[dict]) -> None:
    """Assert that rows agree within rounding errors, and that their samples are equal."""
    assert [len(row["sample"]) for row in rows if "sample" in row] == [PROMPT + 20] * 2
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.pop("sample", None) == other.pop("sample", None)
        assert row == pytest.approx(other, rel=1e-5)


def test_the_error_of_a_process_is_reported_and_one_or_four_processes_continue(run, tmp_path):
    """The state that FSDP2 saves equals that of a single process. Four processes with DDP, or one, continue from it."""
    whole = compose([*run, f"runs={tmp_path}/whole"])
    train_for(5, whole)
    expected = torch.load(Record.of(whole).state, weights_only=True)
    train(whole)

    done = torchrun(2, "-m", "tests.helpers.at_step", "1", "6", "raise", *run, "train.parallel=fsdp")
    record = Record(folder_of(compose(run)))
    assert done.returncode != 0
    assert done.stderr.count("\nRuntimeError: the sky is falling") == 1
    last_words = done.stderr.split("Root Cause")[1]  # torchrun's
    assert re.search(r"\n *\n *error: RuntimeError: the sky is falling\n", last_words), last_words
    state = torch.load(record.state, weights_only=True)
    assert state["step"] == expected["step"] == 4
    torch.testing.assert_close(state["model"], expected["model"])
    one, other = state["optimizer"], expected["optimizer"]
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    # The moments are compared too: AdaBelief's steps hardly depend on the scale of the gradients, so that a wrong scale
    # would show in the moments but not in the weights.
    for key, moments in one["state"].items():
        torch.testing.assert_close(moments, other["state"][key], rtol=1e-3, atol=1e-7)

    by_one = compose([*run, f"runs={tmp_path}/by_one"])
    shutil.copytree(tmp_path / "runs", tmp_path / "by_one")
    train(by_one)
    offline = [a for a in run if not a.startswith("wandb")] + [f"wandb.dir={tmp_path}"]
    done = torchrun(4, "train.py", *offline)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("continuing") == done.stdout.count("records: ") == 1
    for folder in (folder_of(by_one), record.folder):
        same_numbers(rows_of(folder), rows_of(folder_of(whole)))
        losses = [
            Record(f).finished_with_weights()["evaluation"]["heldout"]["loss"] for f in (folder, folder_of(whole))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert record.finished_with_weights()["processes"] == 4
    assert record.finished_with_weights()["command"].startswith("torchrun --nproc-per-node=4 train.py ")
    assert sorted(p.name for p in record.folder.iterdir()) == sorted(p.name for p in folder_of(whole).iterdir())
    assert_mirrored(tmp_path, rows_of(record.folder))


def test_all_stop_at_the_same_step_and_a_killed_process_ends_the_others(run, tmp_path):
    """Two processes with DDP stop when one of them gets a signal.

    Two processes with FSDP2 continue the run until one of them is killed. Then a single process continues it. Both
    pairs accumulate gradients and checkpoint activations; the single process does not. The model has a carry from
    layer to layer.
    """
    run += ["attn=realformer", "optim=adamw"]  # AdamW's state holds a number besides its moments
    several = [*run, "train.accumulate=2", "model.activation_checkpointing=true"]
    record = Record(folder_of(compose(several)))
    done = torchrun(2, "-m", "tests.helpers.at_step", "1", "3", "term", *several)
    assert done.returncode != 0
    assert "stopped by SIGTERM after step 3 of 8; the same command continues the run" in done.stdout
    assert 'train.py", line' not in done.stderr  # a traceback of ours
    assert "find_unused_parameters" not in done.stderr  # DDP warns if this is set without need
    assert torch.load(record.state, weights_only=True)["step"] == 3
    assert json.loads(record.summary.read_text())["status"] == "interrupted"

    done = torchrun(2, "-m", "tests.helpers.at_step", "1", "4", "kill", *several, "train.parallel=fsdp")
    assert done.returncode != 0
    assert "continuing" in done.stdout
    assert "Signal 9 (SIGKILL) received" in done.stderr.split("Root Cause")[1]
    assert done.stderr.count("error: another process of this run died") == 1
    assert torch.load(record.state, weights_only=True)["step"] == 6

    train(compose(run))
    whole = compose([*run, f"runs={tmp_path}/whole"])
    train(whole)
    same_numbers(rows_of(record.folder), rows_of(folder_of(whole)))


def test_a_batch_must_have_equal_parts(tiny):
    cfg = compose([*tiny, "train.batch=8", "train.accumulate=3", "model.norm=rezero"])
    with pytest.raises(UserError, match=r"divisible by 2 processes x train.accumulate=3: got 8"):
        check(cfg, 2)
    with pytest.raises(UserError, match=r"divisible by train.accumulate=3: got 8"):
        check(cfg, 1)
    cfg.train.accumulate, cfg.train.parallel = 4, "fsdp"
    check(cfg, 1)
    with pytest.raises(UserError, match=r"scalar parameters of model.norm=rezero: take ddp"):
        check(cfg, 2)


def test_the_first_process_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr(configs.process, "WAIT", 0)
    for rank, printed in (("0", "error: no\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            give_up("no", status=2)
        assert capsys.readouterr().err == printed
        assert json.loads(report.read_text())["message"]["message"] == "no"


# In AFT, alpha and the bias of K cancel and get no gradient.
@pytest.mark.parametrize(("variant", "unused"), [("aft", True), ("mha_rotary", False)])
def test_what_gets_no_gradient_is_known(variant, unused):
    ids = torch.zeros(1, 16, dtype=torch.long)
    assert has_unused_parameters(built(f"attn={variant}"), ids) is unused


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_its_weights(variant):
    """A model on the meta device that has loaded the state_dict computes the same, so the state_dict is complete."""
    model, ids = built(f"attn={variant}", "model.layers=2"), torch.randint(40, (1, 16))
    with torch.device("meta"):
        copy = built(f"attn={variant}", "model.layers=2")
    copy.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(copy(ids), model(ids))
        assert torch.equal(*(m.step(ids[:, 0], m.begin(1)) for m in (copy, model)))


# What a large model needs


def built(*overrides: str) -> LM:
    """Return a tiny model, whose config is composed without the checks of `compose`, which take time."""
    cfg, _ = composed("config", [*TINY, *overrides])
    torch.manual_seed(0)
    return build_model(cfg, 40)


def gradients(model: LM, accumulate: int = 1) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of one step, and the number of bytes that were kept for the backward pass."""
    torch.manual_seed(1)
    ids, kept = torch.randint(40, (4, 17)), {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        inputs, still = (ids[:, :-1], ids[:, 1:]), torch.optim.SGD(model.parameters(), lr=0.0)
        update(model.loss, still, *inputs, torch.device("cpu"), "float32", accumulate)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_computed_again_are_the_same(variant):
    model = built(f"attn={variant}", "model.layers=3")
    plain, kept = gradients(model)
    model.activation_checkpointing = True
    again, kept_again = gradients(model)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    assert kept_again < kept / 2


def test_parts_of_a_batch_give_its_gradients():
    model = built()
    torch.testing.assert_close(gradients(model, accumulate=4)[0], gradients(model)[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("variant", ["aft", "gau"])
def test_with_a_scaled_start_24_layers_add_about_as_much_as_one(variant):
    def added(layers: int, scaled: str) -> float:
        """Return the standard deviation of what all blocks together add to their input."""
        model = built(f"attn={variant}", "model.dim=96", f"model.layers={layers}", f"model.scaled_init={scaled}")
        x = y = model.embed(torch.randint(40, (4, 16)))
        for block in model.blocks:
            y, _ = block(y)
        return (y - x).std().item()

    assert added(24, "false") > 3 * added(1, "false")
    assert added(24, "true") == pytest.approx(added(1, "true"), rel=0.5)


def test_a_scaled_start_divides_output_projections_alone():
    plain, scaled = (built("model.layers=8", f"model.scaled_init={s}").state_dict() for s in ("false", "true"))
    for name, weight in plain.items():
        divided = name.endswith(("attn.out.weight", "ffn.O.weight"))
        torch.testing.assert_close(scaled[name], weight / 4 if divided else weight)

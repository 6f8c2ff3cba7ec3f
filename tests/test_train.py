"""Runs: what they record, how they end, how they continue, and how damaged files are refused."""

import errno
import fcntl
import itertools
import json
import math
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save

import training.checkpoint
import training.provenance
import training.trainer
from attn.aft import AFT
from configs.cli import compose
from data.files import UserError
from data.reading import read_json
from evaluate import run as evaluate_command
from models.build import build_model
from models.ffn import GLU
from models.lm import initialise
from scripts import dashboard
from tests.conftest import EXPERIMENTS, ROOT, TINY, VARIANTS, command
from tests.helpers.runs import Cut, assert_mirrored, assert_the_same, cut_off, flip, folder_of, rows_of, train_for
from train import train
from training import metrics
from training.causality import check_causal
from training.evaluation import evaluate, score
from training.loading import load_run
from training.optimizer import update
from training.record import Record
from training.settings import differing
from training.wandb_mirror import Mirror

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_trains(experiment, tiny):
    cfg = compose([f"experiment={experiment}", *tiny])
    summary = train(cfg)
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    record = Record.of(cfg)
    assert [row["step"] for row in record.rows()] == [1, 2, 3, 4]
    assert [row["tokens"] for row in record.rows()] == [32, 64, 96, 128]
    assert {"fit_perplexity", "heldout_perplexity"} <= record.rows()[-1].keys()
    assert record.finished_with_weights() == summary
    record.metrics.write_text(record.metrics.read_text().rsplit("{", 1)[0])
    with pytest.raises(UserError, match=r"metrics.jsonl is cut short: it does not reach step 4"):
        record.rows()
    assert sorted(p.name for p in record.folder.iterdir()) == [
        "config.yaml", "f.json", "loss_by_position.json", "metrics.jsonl", "model.safetensors", "summary.json",
        "text.safetensors", "vocabulary.json",
    ]  # fmt: skip


@pytest.mark.parametrize("leak", ["next", "mean", "chunks"])
def test_an_attention_that_sees_later_positions_is_refused(leak, tiny, monkeypatch):
    def mix(self, x):
        V = self.V(x)
        if leak == "chunks":  # of 4 positions
            return V.unflatten(1, (-1, 4)).cumsum(1).sum(2).repeat_interleave(4, dim=1)
        return V.roll(-1, dims=1) if leak == "next" else V.mean(1, keepdim=True).expand_as(V)

    monkeypatch.setattr(AFT, "mix", mix)
    cfg = compose(["attn=aft", *tiny])
    with pytest.raises(UserError, match=r"attn=aft is not causal: outputs before position 7 depend on inputs from"):
        train(cfg)
    assert not folder_of(cfg).exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_models_pass_the_check_and_keep_their_mode(variant):
    cfg = compose([f"attn={variant}", "model.dim=64", "model.heads=2", "model.context=200", "model.layers=2"])
    model = build_model(cfg, 50)
    for mode in (True, False):
        check_causal(model.train(mode), variant, 200, 50)
        assert model.training is mode


def test_a_summary_has_the_origin_of_its_figures(tiny):
    cfg = compose(["attn=gmlp", "seed=7", *tiny])
    summary = train(cfg)
    assert summary["data"]["characters"] == 20_000
    assert len(summary["data"]["sha256"]) == 64
    assert summary["command"] == cfg.job.command
    assert summary["command"].startswith("python train.py attn=gmlp seed=7 ")
    assert summary["versions"]["torch"] == torch.__version__
    assert {"commit", "dirty", "device", "precision", "parameters"} <= summary.keys()
    assert set(summary["evaluation"]) == {"fit", "heldout", "sliding", "heldout_best", "tokens_per_second"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_lowers_the_loss(variant, tiny):
    cfg = compose([f"attn={variant}", *tiny, "train.steps=40", "train.batch=16", "evaluation.every=40"])
    train(cfg)
    losses = [row["loss"] for row in Record.of(cfg).rows()]
    assert losses[0] == pytest.approx(math.log(200), abs=0.05)
    assert losses[-1] < losses[0] - 0.2


def test_steps_0_describes_the_model_and_writes_nothing(tiny, tmp_path, capsys):
    assert train(compose(["attn=aft", *tiny, "train.steps=0"])) is None
    assert (
        "aft: 17,368 parameters, impl torch (dense Toeplitz products), on cpu, float32 (train.precision=float32)\n"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "runs").exists()


def test_the_whole_text_is_measured_and_stored_in_two_bytes_per_character(tiny):
    """Both texts are measured as a whole, and the mean of the losses by position is the loss."""
    cfg = compose([*tiny, "evaluation.final_windows=2000"])
    evaluation = train(cfg)["evaluation"]
    record = Record.of(cfg)
    assert (evaluation["fit"]["characters"], evaluation["heldout"]["characters"]) == (1187 * 16, 62 * 16)
    for name in ("fit", "heldout"):
        assert evaluation[name]["bytes"] == 3 * evaluation[name]["characters"]
        positions = json.loads(record.loss_by_position.read_text())[name]
        assert len(positions) == 16
        assert sum(positions) / 16 == pytest.approx(evaluation[name]["loss"], abs=1e-5)
    assert record.text.stat().st_size < 20_000 * 2 + 200 * 4 + 500
    record.start(cfg)
    assert not record.loss_by_position.exists()


def test_the_best_held_out_loss_is_the_lowest_of_the_curve(tiny, monkeypatch):
    points = iter([{"heldout_loss": loss, "heldout_perplexity": 10 * loss} for loss in (3.0, 1.0, 2.0)])
    monkeypatch.setattr(training.trainer, "curve_point", lambda *_: next(points))
    evaluation = train(compose([*tiny, "train.steps=6"]))["evaluation"]
    assert evaluation["heldout_best"] == {
        "step": 4,
        "loss": 1.0,
        "perplexity": 10.0,
        "last_perplexity": 20.0,
        "characters": 2 * 16,
    }


def test_the_learned_f_is_recorded(tiny, tmp_path):
    """f is recorded to four significant digits, also if the trained parameter is its logarithm."""
    for attn, trained in (("aft", torch.exp), ("gmlp", lambda f: f)):
        cfg = compose([*tiny, f"attn={attn}", "optim.lr=0.1"])
        train(cfg)
        f = trained(load_run(folder_of(cfg))[1].blocks[0].attn.position_weight.f.detach())
        assert (f != 1).any()
        torch.testing.assert_close(torch.tensor(read_json(Record.of(cfg).f)["f"]), f, rtol=1e-3, atol=0)
        (shown,) = dashboard.collect(folder_of(cfg), tmp_path)["runs"]
        assert shown["f"]["heads"] == read_json(Record.of(cfg).f)["f"]
    Record.of(cfg).start(cfg)
    assert not Record.of(cfg).f.exists()


def test_evaluations_are_printed(tiny, capsys):
    train(compose(tiny))
    rows = [row for row in Record(folder_of(compose(tiny))).rows() if "fit_perplexity" in row]
    output = capsys.readouterr().out
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        figures = f"fit {row['fit_perplexity']:.2f}, held-out {row['heldout_perplexity']:.2f}"
        assert f"step {row['step']}/4: perplexity {figures}\n" in output


def test_holdout_0_trains_on_everything(tiny):
    summary = train(compose([*tiny, "data.holdout=0"]))
    assert set(summary["evaluation"]) == {"fit", "tokens_per_second"}


def test_a_finished_run_is_not_run_again(tiny, capsys):
    cfg = compose(tiny)
    first = train(cfg)
    changed = Record.of(cfg).model.stat().st_mtime_ns
    assert train(compose(tiny)) == first
    assert "finished before: aft" in capsys.readouterr().out
    assert Record.of(cfg).model.stat().st_mtime_ns == changed
    train(compose([*tiny, "resume=false"]))
    assert Record.of(cfg).model.stat().st_mtime_ns != changed


def test_a_finished_run_of_other_code_or_settings_is_reported(tiny, capsys, monkeypatch):
    """A run's name does not show that an attention, or a default in its yaml, has changed."""
    cfg = compose(tiny)
    train(cfg)
    now = training.provenance.code()
    for other in ({"commit": "0" * 40}, {"changes": "0" * 64}):
        with monkeypatch.context() as patch:
            patch.setattr(training.provenance, "code", lambda other=other: now | other)
            train(cfg)
        assert "finished before with other code (resume=false trains it anew): aft" in capsys.readouterr().out
    cfg.attn.token_shift = False
    with pytest.raises(UserError, match=r"was trained with another attn.token_shift: resume=false trains it anew"):
        train(cfg)


def test_every_change_of_the_code_has_another_hash(tmp_path, monkeypatch):
    for line in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *line], cwd=tmp_path, check=True)
    (tmp_path / "one.py").write_text("1")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "-qm", "one"], cwd=tmp_path, check=True)
    monkeypatch.setattr(training.provenance, "ROOT", tmp_path)
    clean = training.provenance.read_code()
    assert (clean["dirty"], clean["changes"]) == (False, None)
    found = [clean]
    for name, text in (("one.py", "2"), ("one.py", "3"), ("new.py", "1"), ("new.py", "2"), ("text.txt", "1")):
        (tmp_path / name).write_text(text)
        found.append(training.provenance.read_code())
        assert found[-1]["dirty"]
        assert found[-1]["commit"] == clean["commit"]
    assert len({one["changes"] for one in found}) == len(found)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/a.json").write_text("{}")
    assert training.provenance.read_code() == found[-1]


def test_a_record_without_weights_is_only_replaced_with_resume_false(tiny):
    """If the weights of a finished run were deleted, repeating its command must not overwrite its record."""
    cfg = compose(tiny)
    first = train(cfg)
    record = Record.of(cfg)
    rows, summary = rows_of(record.folder), record.summary.read_bytes()
    record.model.unlink()
    with pytest.raises(UserError, match="is a finished run without its weights: resume=false trains it anew"):
        train(cfg)
    assert (rows_of(record.folder), record.summary.read_bytes()) == (rows, summary)
    measured = [folder_of(compose(tiny)) / name for name in ("evaluation-stride=8.json", "lengths.json")]
    for path in measured:  # measurements of the weights that are replaced
        path.write_text("{}")
    assert train(compose([*tiny, "resume=false"]))["evaluation"]["fit"] == first["evaluation"]["fit"]
    assert not any(path.exists() for path in measured)
    assert rows_of(record.folder) == rows


# Continuing interrupted runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_continued_run_equals_one_that_never_stopped(variant, tiny, tmp_path):
    long = [f"attn={variant}", *tiny, "train.steps=9", "train.log_every=2", "train.checkpoint_seconds=0"]
    whole, cut = compose([*long, f"runs={tmp_path}/whole"]), compose(long)
    train(whole)
    for step in (3, 4):  # steps until the run is cut off; the second call continues it
        train_for(step, cut)
    train(cut)
    assert_the_same(folder_of(cut), folder_of(whole))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("given", [["attn=mha_plus"], ["attn=aft", "attn.impl=triton"], ["attn=gmlp"]])
def test_a_run_on_a_gpu_is_completed_after_an_interruption(given, tiny):
    cfg = compose([*tiny, *given, "train.device=cuda", "train.precision=auto", "train.checkpoint_seconds=0"])
    train_for(2, cfg)
    summary = train(cfg)
    assert summary["precision"] == "bf16"
    assert summary["evaluation"]["fit"]["perplexity"] == pytest.approx(200, rel=0.1)


def begin(arguments: list[str], until: str) -> subprocess.Popen:
    """Start train.py in another process, and return it when it has printed `until`."""
    program = [sys.executable, "train.py", *arguments]
    process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if until in line:
            return process
    raise AssertionError("".join(lines))


def saved_at(state: Path) -> int:
    """Return the time at which a state was saved, in nanoseconds, or 0 if there is none."""
    return state.stat().st_mtime_ns if state.exists() else 0


def test_a_run_continues_after_each_signal(tiny, tmp_path):
    long = [*tiny, "train.steps=300", "train.log_every=5", "train.checkpoint_seconds=0.05", "evaluation.every=150"]
    long = [a for a in long if not a.startswith("wandb")] + [f"wandb.dir={tmp_path}"]
    folder = folder_of(compose(long))
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        before = saved_at(folder / "state.pt")
        process = begin(long, "the remaining steps will take about")
        deadline = time.monotonic() + 60
        while saved_at(folder / "state.pt") == before and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(sent)
        output = process.communicate()[0]
        if sent == signal.SIGKILL:
            assert process.returncode == -9
        else:
            assert process.returncode == 128 + sent
            assert f"stopped by {sent.name} after step" in output
            assert "Traceback" not in output
            assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert not (folder / "model.safetensors").exists()

    done = command("train.py", *long)
    assert done.returncode == 0, done.stderr
    assert "continuing" in done.stdout
    whole = compose([*long, f"runs={tmp_path}/whole", "wandb.mode=disabled"])
    train(whole)
    assert_the_same(folder, folder_of(whole))
    assert not list(folder.glob(".*"))
    assert_mirrored(tmp_path, rows_of(folder))


def test_wandb_gets_the_settings_and_figures_of_a_run(tiny, tmp_path):
    offline = [a for a in tiny if not a.startswith("wandb")] + [f"wandb.dir={tmp_path}"]
    train(compose([*offline, "attn=gmlp", "seed=3"]))
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    inspect = [wandb, "leet", "inspect", "--summary", "--json", log]
    run = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    printed = json.dumps(run)
    for key in ("fit_perplexity", "heldout_perplexity", "tokens_per_second", "parameters", "model.dim", "attn.gamma"):
        assert f'"{key}"' in printed
    for key in (
        "fit_bits_per_character",
        "heldout_bits_per_byte",
        "heldout_best_step",
        "flops_per_step",
        "state_bytes",
    ):
        assert f'"{key}"' in printed
    assert '"_target_"' not in printed


def test_leet_lists_runs_by_their_names(tiny, tmp_path):
    """leet/, which `wandb leet` lists, holds one link for each run, to the folder that wandb wrote for it.

    The link's name consists of `run-`, the run's name and experiment (cut after 100 bytes), and the name of wandb's
    folder, which ends with the id by which leet finds the log.
    """
    offline = [a for a in tiny if not a.startswith("wandb")] + [f"wandb.dir={tmp_path}", "attn=gmlp"]
    for overrides in ([], ["train.steps=5", "resume=false"], ["train.steps=5", "resume=false"]):
        train(compose([*offline, *overrides]))
    links = sorted((tmp_path / "leet").iterdir())
    names = sorted(f"run-{compose([*offline, *o]).job.name}-small"[:104] for o in ([], ["train.steps=5"]))
    assert [re.split(r"-offline-run-\d{8}_\d{6}-", link.name)[0] for link in links] == names
    for link in links:
        identity = re.split(r"run-\d{8}_\d{6}-", link.name)[1]
        assert (link / f"run-{identity}.wandb").resolve().parent.parent == tmp_path / "wandb"


# Damaged and foreign files


def test_a_damaged_state_is_refused(tiny):
    long = [*tiny, "train.steps=9", "train.checkpoint_seconds=0"]
    train_for(5, compose(long))
    state = folder_of(compose(long)) / "state.pt"
    whole = state.read_bytes()
    weights = Record(state.parent).read_state()["model"]["embed.weight"].numpy().tobytes()
    for harmed in (b"", whole[:10], whole[: len(whole) // 2], whole[:-1], weights, b"PK\x06\x06"):
        # A weight, or the last of the bytes 48 to 55 after PK, which say where the archive's table of contents is.
        if harmed in (weights, b"PK\x06\x06"):
            state.write_bytes(whole)
            flip(state, whole.index(harmed) + (55 if harmed != weights else 0))
        else:
            state.write_bytes(harmed)
        with pytest.raises(UserError, match=r"state.pt is damaged: resume=false trains the run anew"):
            train(compose(long))


def test_a_key_that_an_older_config_lacks_has_its_default(tiny):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    path = folder_of(cfg) / "config.yaml"
    older = OmegaConf.load(path)
    later = (
        "model.scaled_init",
        "model.output_scale",
        "model.dropout",
        "model.position_embedding",
        "attn.key_scale",
        "attn.position_weight.initial_f",
        "optim.clip",
        "train.stop",
        "train.patience",
        "train.init_from",
    )
    for key in later:
        part, name = key.rsplit(".", 1)
        del OmegaConf.select(older, part)[name]
    OmegaConf.save(older, path)
    assert train(cfg)["status"] == "finished"
    OmegaConf.save(older, path)
    load_run(folder_of(cfg))


def test_a_run_may_stop_before_the_end_of_its_schedule(tiny):
    """With train.stop, a run takes the first steps of the whole run, and is evaluated after the last of them."""
    whole, part = compose([*tiny, "train.steps=6"]), compose([*tiny, "train.steps=6", "train.stop=3"])
    assert part.job.name != whole.job.name
    assert train(whole)["steps"] == 6
    summary = train(part)
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 3, 3 * 2 * 16)
    rows = Record.of(part).rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "fit_loss" in rows[-1]
    for row, other in zip(rows, Record.of(whole).rows()[:3], strict=True):
        assert (row["lr"], row["loss"]) == (other["lr"], other["loss"])


def test_a_run_with_an_attention_as_its_feed_forward_is_loaded(tiny):
    cfg = compose([*tiny, "ffn=attention"])
    train(cfg)
    load_run(folder_of(cfg))


def test_a_run_with_another_position_weight_is_continued_and_loaded(tiny):
    """ChannelDecay lacks the keys of the Toeplitz weights that rwv has by default."""
    cfg = compose(
        [*tiny, "attn=rwv", "attn/position_weight=channel_decay", "train.steps=9", "train.checkpoint_seconds=0"]
    )
    train_for(5, cfg)
    assert train(cfg)["status"] == "finished"
    load_run(folder_of(cfg))


def test_a_continued_run_of_adamw_equals_one_that_never_stopped(tiny, tmp_path):
    long = [*tiny, "optim=adamw", "ffn=channel_mix", "train.steps=9", "train.checkpoint_seconds=0"]
    whole, cut = compose([*long, f"runs={tmp_path}/whole"]), compose(long)
    train(whole)
    train_for(5, cut)
    train(cut)
    assert (folder_of(cut) / "model.safetensors").read_bytes() == (folder_of(whole) / "model.safetensors").read_bytes()


def test_another_config_is_not_continued(tiny):
    long = [*tiny, "train.steps=9", "train.checkpoint_seconds=0"]
    train_for(5, compose(long))
    config = folder_of(compose(long)) / "config.yaml"
    config.write_text(config.read_text().replace("gamma: true", "gamma: false"))
    with pytest.raises(UserError, match=r"begun with another attn.gamma: resume=false starts it again"):
        train(compose(long))


def test_each_key_that_differs_is_named_once():
    one, other = (compose([*TINY, *given]) for given in ([], ["seed=7", "data.holdout=0.2"]))
    assert sorted(differing(one, other)) == ["data.holdout", "seed"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (5, "was begun on another text: resume=false starts it again"),
        (9, "was trained on another text: resume=false trains it anew"),
    ],
    ids=["begun", "finished"],
)
def test_a_run_is_not_continued_or_reported_on_another_text(tiny, text, tmp_path, steps, message):
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text.read_bytes())
    ours = [*(a for a in tiny if not a.startswith("data.path")), f"data.path={copy}", "train.steps=9"]
    cfg = compose([*ours, "train.checkpoint_seconds=0"])
    if steps == 9:
        train(cfg)
    else:
        train_for(steps, cfg)
    copy.write_text(text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    with pytest.raises(UserError, match=message):
        train(cfg)


def test_a_full_disk_leaves_the_last_state(tiny):
    """A limit on the size of files simulates a full disk. If a new state does not fit, the one before it stays."""
    long = [*tiny, "train.steps=9", "train.checkpoint_seconds=0"]
    train_for(5, compose(long))
    state = folder_of(compose(long)) / "state.pt"
    before = state.read_bytes()

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = command("train.py", *long, preexec_fn=small_files)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert "state.pt: File too large" in done.stderr
    assert state.read_bytes() == before
    assert not [p for p in state.parent.iterdir() if p.name.startswith(".")]
    assert command("train.py", *long).returncode == 0


def test_a_sweep_continues_after_a_failure_and_names_it(tiny, tmp_path):
    sweep = ["-m", *tiny, "attn=aft,mha", "model.heads=3,5"]
    done = command("train.py", *[a for a in sweep if a != "model.heads=3"])
    assert done.returncode == 1
    assert "2 of the sweep's jobs failed:" in done.stderr
    for variant in ("aft", "mha"):
        (failed,) = (line for line in done.stderr.splitlines() if line.startswith("  ") and f"attn={variant}" in line)
        assert failed.endswith("heads must divide the width: 5 heads, width 24")
        (folder,) = (tmp_path / "runs/small").glob(f"{variant}-*-seed0")
        assert Record(folder).finished_with_weights()
    again = command("train.py", *[a for a in sweep if a != "model.heads=3"])
    assert again.stdout.count("finished before") == 2


# Evaluation


def test_evaluate_at_another_length(tiny, monkeypatch, capsys):
    """The runs keep the training text in windows of their context, and the held-out text in one piece.

    Evaluation with longer windows therefore measures only the held-out text, and with shorter windows both texts.

    An attention with parameters for absolute positions refuses windows beyond its context.
    """

    def evaluated(folder, *given) -> dict:
        """Run evaluate.py, and return the contents of the file that it writes."""
        monkeypatch.setattr("sys.argv", ["evaluate.py", f"run={folder}", *given])
        evaluate_command()
        return json.loads((folder / f"{'-'.join(['evaluation', *given])}.json").read_text())

    runs = [compose([*tiny, f"attn={attn}", "evaluation.final_windows=16"]) for attn in ("gau", "aft")]
    for cfg in runs:
        train(cfg)
    any_length, positions = (folder_of(cfg) for cfg in runs)
    whole = evaluated(any_length)
    assert whole["stride"] == 8
    longer = evaluated(any_length, "context=64", "stride=16")
    assert "fit" not in longer
    assert longer["heldout"]["characters"] == 256
    shorter = evaluated(positions, "context=8")
    assert shorter["fit"]["characters"] == 16 * 16
    assert evaluated(positions, "stride=4")["sliding"] != evaluated(positions)["sliding"]
    assert evaluated(any_length)["heldout"] == whole["heldout"]
    config = positions / "config.yaml"
    config.write_text(config.read_text().replace("impl: torch", "impl: triton"))  # as if trained on a GPU
    assert evaluated(positions, "context=8")["fit"] == shorter["fit"]
    if not torch.cuda.is_available():
        assert load_run(positions).model(torch.zeros(1, 8, dtype=torch.long)).isfinite().all()
    for given, message in (
        ("context=64", "w is defined for 16 positions: got 64"),
        ("context=999", "context must be at most 256"),
        ("context=0", "context must be 1 or more: got 0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            evaluated(positions, given)
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_evaluate_needs_only_the_folder_of_the_run(tiny, tmp_path):
    cfg = compose(tiny)
    summary = train(cfg)
    elsewhere = tmp_path / "elsewhere, 别处=1"
    folder_of(cfg).rename(elsewhere)
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    done = command("evaluate.py", f"run={elsewhere}")  # with the run's own stride
    assert done.returncode == 0, done.stderr
    written = json.loads((elsewhere / "evaluation.json").read_text())
    for text in ("fit", "heldout", "sliding"):
        assert written[text] == summary["evaluation"][text]
    assert f"{summary['evaluation']['fit']['perplexity']:.3f}" in done.stdout


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"\x10" * 50), "is damaged: it is not a safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "is damaged"),
        (lambda f: flip(f / "model.safetensors", -5), "model.safetensors is damaged: its sha256 is not the one in"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no model"),
        (lambda f: (f / "vocabulary.json").write_text("[1, 2"), "vocabulary.json is damaged: it is not JSON"),
        (lambda f: (f / "vocabulary.json").write_text('["a", "b"]'), "holds the weights of another model"),
        (
            lambda f: (f / "vocabulary.json").write_text("[1, 2]"),
            "vocabulary.json is damaged: it is not a list of",
        ),
        (lambda f: (f / "vocabulary.json").write_text("[" * 99_999), "vocabulary.json is damaged: it is not JSON"),
        (lambda f: flip(f / "vocabulary.json", 7), "vocabulary.json is damaged: its sha256 is not the one in"),
        (lambda f: flip(f / "text.safetensors", -2), "text.safetensors is damaged: its sha256 is not the one in"),
        (lambda f: flip(f / "text.safetensors", -1), "text.safetensors is of another text"),
        (lambda f: (f / "summary.json").write_text("[]"), "summary.json is damaged: it is not a JSON object"),
        (lambda f: (f / "text.safetensors").unlink(), "cannot read"),
        (lambda f: (f / "text.safetensors").write_bytes(save({"x": torch.ones(1)})), "does not hold token ids"),
        (lambda f: (f / "config.yaml").write_text("a: [1"), "config.yaml is damaged: it is not YAML"),
        (lambda f: (f / "config.yaml").write_text("&a [*a]"), "config.yaml is damaged: it is not YAML"),
        (lambda f: (f / "config.yaml").write_text("a: !!bool b"), "config.yaml is damaged: it is not YAML"),
        (lambda f: (f / "config.yaml").write_text("a: !!int ''"), "config.yaml is damaged: it is not YAML"),
        (lambda f: (f / "config.yaml").write_text("a: !!timestamp b"), "config.yaml is damaged: it is not YAML"),
        (lambda f: cut_off(f / "config.yaml", "job:"), "config.yaml is damaged: it is not the whole config"),
        (lambda f: (f / "config.yaml").unlink(), "holds no run"),
    ],
)
def test_a_damaged_file_is_named(tiny, harm, message):
    cfg = compose(tiny)
    train(cfg)
    harm(folder_of(cfg))
    with pytest.raises(UserError, match=message):
        load_run(folder_of(cfg))


def test_a_run_of_an_experiment_that_no_longer_exists_is_loaded(tiny):
    cfg = compose([*tiny, "attn=mha"])
    train(cfg)
    path = folder_of(cfg) / "config.yaml"
    path.write_text(path.read_text().replace("experiment: small", "experiment: gone"))
    assert load_run(folder_of(cfg)).cfg.job.experiment == "gone"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("attn", r"_target_=builtins.open is refused: no file in configs/attn or configs/ffn names it"),
        (
            "attn.position_weight",
            r"_target_=builtins.open is refused: no file in configs/attn or configs/ffn names it",
        ),
        ("attn.token_shift", r"config.yaml is damaged: attn.token_shift must be true or false"),
    ],
)
def test_a_target_that_configs_attn_lacks_is_not_called(tiny, tmp_path, where, message):
    cfg = compose(tiny)
    train(cfg)
    harmful = OmegaConf.load(folder_of(cfg) / "config.yaml")
    call = {"_target_": "builtins.open", "file": f"{tmp_path}/made", "mode": "w"}
    OmegaConf.update(harmful, where, [call] if where == "attn.token_shift" else call, merge=False)
    OmegaConf.save(harmful, folder_of(cfg) / "config.yaml")
    with pytest.raises(UserError, match=message):
        load_run(folder_of(cfg))
    assert not (tmp_path / "made").exists()


def test_another_run_s_state_is_not_continued(tiny):
    """Both models have the same shapes, so the other run's weights would fit. The name in the state must be checked."""
    ours, theirs = (compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0", f"seed={seed}"]) for seed in (0, 1))
    for cfg in (ours, theirs):
        train_for(5, cfg)
    rows = rows_of(folder_of(ours))
    (folder_of(ours) / "state.pt").write_bytes((folder_of(theirs) / "state.pt").read_bytes())
    for use in (lambda: train(ours), lambda: load_run(folder_of(ours))):
        with pytest.raises(UserError, match=r"state.pt is the state of small/aft-.*-seed1"):
            use()
    assert rows_of(folder_of(ours)) == rows


def test_another_run_s_metrics_are_not_continued(tiny):
    """Foreign metrics may be longer or shorter than the run's own. They are recognised by their first row.

    A power cut can damage the first row, but it cannot turn it into a valid row of another run.
    """
    long = [*tiny, "train.steps=9", "train.checkpoint_seconds=0"]
    ours, theirs = (compose([*long, f"seed={seed}"]) for seed in (0, 1))
    train_for(5, ours)
    train_for(7, theirs)
    path, rows = Record.of(ours).metrics, Record.of(theirs).metrics.read_bytes()
    for foreign in (rows, b"".join(rows.splitlines(keepends=True)[:2])):
        path.write_bytes(foreign)
        with pytest.raises(UserError, match=r"metrics\.jsonl and state\.pt are of different runs: resume=false"):
            train(ours)
        assert path.read_bytes() == foreign


def test_another_run_s_summary_is_not_taken_for_this_one_s(tiny):
    ours, theirs = (compose([*tiny, f"seed={seed}"]) for seed in (0, 1))
    for cfg in (ours, theirs):
        train(cfg)
    Record.of(ours).summary.write_bytes(Record.of(theirs).summary.read_bytes())
    with pytest.raises(UserError, match=r"summary\.json is of small/aft-.*-seed1: resume=false trains the run anew"):
        train(ours)


def test_a_file_that_is_not_a_state_of_this_model_is_refused(tiny):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    whole = Record.of(cfg).read_state()
    for harmed, message in (
        ([1, 2], "state.pt is damaged"),
        ({"step": 3}, "state.pt is damaged"),
        (whole | {"model": {"x": torch.ones(1)}}, "state.pt is damaged or of another model"),
        (whole | {"optimizer": {}}, "state.pt is damaged or of another model"),
    ):
        torch.save(harmed, folder_of(cfg) / "state.pt")
        with pytest.raises(UserError, match=message):
            train(cfg)


def test_a_lack_of_memory_is_not_reported_as_a_damaged_state(tiny, monkeypatch):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training.checkpoint, "load_model", full)
    with pytest.raises((torch.OutOfMemoryError, UserError)) as error:
        train(cfg)
    assert "resume=false" not in str(error.value)


def test_a_continued_run_writes_lost_text_files_again(tiny):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    for name in ("vocabulary.json", "text.safetensors"):
        (folder_of(cfg) / name).unlink()
    train(cfg)
    load_run(folder_of(cfg))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "config.yaml").write_text("a: [1"), "config.yaml is damaged: it is not YAML"),
        (lambda f: (f / "config.yaml").unlink(), "cannot read"),
        (lambda f: (f / "state.pt").write_bytes(b"PK"), "state.pt is damaged"),
    ],
)
def test_a_run_that_cannot_be_continued_names_the_reason(tiny, harm, message):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    harm(folder_of(cfg))
    with pytest.raises(UserError, match=message):
        train(cfg)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"{" * 9999),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n" + bytes(4096)),
        lambda path: path.write_bytes(bytes(99) + path.read_bytes()[99:]),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"loss": ', b'"loss": 00')),
    ],
)
def test_a_run_whose_rows_are_lost_continues_from_its_state(tiny, tmp_path, monkeypatch, capsys, harm):
    """The metrics are damaged as by a power cut. The run continues, is killed, and continues from the same state."""
    long = [*tiny, "train.steps=9", "train.checkpoint_seconds=0"]
    whole, cfg = compose([*long, f"runs={tmp_path}/whole"]), compose(long)
    train(whole)
    train_for(5, cfg)
    harm(Record.of(cfg).metrics)
    monkeypatch.setattr(Record, "save_state", lambda *_: None)  # the run is killed before it saves a state
    train_for(2, cfg)
    monkeypatch.undo()
    assert "the run continues from its state after step 5" in capsys.readouterr().out
    train(cfg)
    assert "has lost rows, as in a power cut; the longest gap is from step" in capsys.readouterr().out
    one, other = Record.of(whole), Record.of(cfg)
    assert one.model.read_bytes() == other.model.read_bytes()
    there = [row["step"] for row in rows_of(folder_of(cfg))]
    assert there[-4:] == [6, 7, 8, 9]
    assert rows_of(folder_of(cfg)) == [row for row in rows_of(folder_of(whole)) if row["step"] in there]
    assert dashboard.read(folder_of(cfg), 100).step == 9


@pytest.mark.parametrize(
    ("harm", "gap"),
    [
        (lambda lines: lines[:1] + lines[3:], (1, 4)),
        (lambda lines: [*lines[:2], bytes(len(lines[2]) - 1) + b"\n", *lines[3:]], (2, 4)),
        (lambda lines: [bytes(4096), *lines], (0, 2)),
        (lambda lines: lines[2:], (0, 3)),
        (lambda lines: lines[:2], (2, 5)),
        (lambda lines: [], (0, 5)),
        (lambda lines: [b"[]\n", bytes(9) + b"\n", *lines], None),
        (lambda lines: lines, None),
        (lambda lines: [*lines, b'{"step": 6, "lo'], None),
        (lambda lines: [*lines, b'{"step": 6, "loss": 1.5}\n', bytes(99)], None),
        (lambda lines: [*lines[:-1], b'{"step": 5, "loss": 1e-07, "sample": "{x}"}\n'], None),
    ],
)
def test_lost_rows_are_named_by_the_longest_gap(tmp_path, capsys, harm, gap):
    record = Record(tmp_path)
    lines = [f'{{"step": {step}, "loss": {step / 7}}}\n'.encode() for step in range(1, 6)]
    record.metrics.write_bytes(b"".join(lines))
    size = sum(map(len, lines))
    harmed = b"".join(harm(lines))
    record.metrics.write_bytes(harmed)
    metrics.repair(record.metrics, 5, size)
    output = capsys.readouterr().out
    assert output.count("\n") == (gap is not None)
    assert gap is None or f"the longest gap is from step {gap[0]} to step {gap[1]}: " in output
    assert set(record.metrics.read_bytes().splitlines(keepends=True)) <= set(harmed.splitlines(keepends=True))
    assert all(row["step"] <= 5 for row in record.rows())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("stopped", ["in the evaluation", "by force"])
def test_a_signal_during_the_final_evaluation_loses_nothing(tiny, monkeypatch, stopped):
    """After one signal, the evaluation is completed. A second signal ends it, and the run is finished later."""
    cfg, evaluate = compose(tiny), training.trainer.evaluate

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        if stopped == "by force":
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments)

    monkeypatch.setattr(training.trainer, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt if stopped == "by force" else SystemExit):
        train(cfg)
    monkeypatch.setattr(training.trainer, "evaluate", evaluate)
    summary = json.loads((folder_of(cfg) / "summary.json").read_text())
    assert summary["status"] == ("interrupted" if stopped == "by force" else "finished")
    assert train(cfg)["status"] == "finished"
    assert [row["step"] for row in rows_of(folder_of(cfg))] == [1, 2, 3, 4]


def test_a_signal_that_also_ends_the_compiler_stops_the_run(tiny, capsys):
    """Ctrl-C also ends g++. torch.compile then raises an error, which must not be shown.

    Without a signal, an error of the compiler is raised as it is.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # this import takes a second

    cfg, signals = compose(tiny), []

    def fail(_trainer):
        for number in signals:
            signal.raise_signal(number)
        raise BackendCompilerFailed("inductor", RuntimeError("C++ compile error"), None)

    with pytest.raises(BackendCompilerFailed):
        train(cfg, fail)
    signals.append(signal.SIGINT)
    with pytest.raises(SystemExit) as stopped:
        train(cfg, fail)
    assert stopped.value.code == 130
    assert "stopped by SIGINT after step 0 of 4; the same command continues the run\n" in capsys.readouterr().out
    assert train(cfg)["status"] == "finished"


def test_signals_interrupt_neither_the_start_nor_the_end_of_wandb(tiny, monkeypatch):
    """A signal that arrives while wandb starts or finishes takes effect afterwards.

    The summary of a run that is killed while wandb finishes does not say that the run is finished.
    """
    cfg = compose(tiny)
    summary, begin, ends = Record.of(cfg).summary, Mirror.__init__, []

    def end(_mirror, exit_code):
        ends.append((exit_code, json.loads(summary.read_text())["status"]))
        if disturb and len(ends) == 1:
            disturb()

    def die():
        raise Cut

    disturb = None
    monkeypatch.setattr(Mirror, "finish", end)
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "__init__", lambda *a: (signal.raise_signal(signal.SIGINT), begin(*a))[1])
        with pytest.raises(SystemExit) as stopped:
            train(cfg)
    assert stopped.value.code == 130
    assert ends[0] == (130, "interrupted")
    ends, disturb = [], die
    with pytest.raises(Cut):
        train(cfg)
    assert ends[0] == (0, "interrupted")
    ends, disturb = [], lambda: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        train(cfg)
    assert stopped.value.code == 143
    assert ends[0] == (0, "interrupted")
    assert json.loads(summary.read_text())["status"] == "finished"
    assert [row["step"] for row in rows_of(folder_of(cfg))] == [1, 2, 3, 4]


def test_perplexity_of_a_model_that_knows_nothing(tiny):
    model = build_model(compose(tiny), 50)
    torch.nn.init.zeros_(model.head.weight)
    sizes = torch.arange(50) % 4 + 1.0
    text = {"fit": torch.randint(50, (5, 40)), "heldout": torch.randint(50, (100,)), "utf8_bytes": sizes}
    result = evaluate(model, text, 16, 8, torch.device("cpu"))
    measured = {"fit": text["fit"][:, 1:33], "heldout": text["heldout"][1:97], "sliding": text["heldout"][1:]}
    for name, targets in measured.items():
        found = result[name]
        assert found["perplexity"] == pytest.approx(50, rel=1e-5)
        assert found["characters"] == targets.numel()
        assert found["bytes"] == sizes[targets].sum()
        assert found["bits_per_character"] == pytest.approx(math.log2(50), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(math.log2(50) * targets.numel() / found["bytes"], rel=1e-5)
    assert result["loss_by_position"] == {
        name: [pytest.approx(math.log(50), abs=2e-5)] * 16 for name in ("fit", "heldout")
    }
    some = evaluate(model, text, 16, 8, torch.device("cpu"), fit_windows=3)
    assert some["fit"]["characters"] == 3 * 16


def test_score_counts_only_the_selected_targets(tiny):
    model = build_model(compose(tiny), 50)
    windows, counted = torch.randint(50, (3, 17)), torch.zeros(3, 16, dtype=torch.bool)
    counted[1, 4:6] = True
    loss = model.loss(windows[:, :-1], windows[:, 1:], mean=False)[1, 4:6].mean().item()
    scored = score(model, windows, counted, torch.device("cpu"))
    assert scored["loss"] == pytest.approx(loss)
    assert scored["characters"] == 2


# Initialisation


def test_initialise_leaves_position_weights_alone():
    model = build_model(compose(["attn=gmlp", *TINY]), 50)
    model.apply(partial(initialise, std=0.02))
    assert (model.blocks[0].attn.position_weight.f == 1).all()
    assert (model.blocks[0].attn.gamma == 1).all()
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)


# Several processes


def test_a_run_is_trained_by_one_process_at_a_time(tiny):
    cfg = compose(tiny)
    record = Record.of(cfg)
    with record.alone():
        half = record.folder / ".state.pt.12345678.tmp"
        half.write_text("what a killed process left")
        second = command("train.py", *tiny)
        assert second.returncode == 2
        assert second.stderr.count("\n") == 1
        assert f"{record.folder} is being trained by process {os.getpid()} on " in second.stderr
        assert half.exists()
        assert [path.name for path in sorted(record.folder.iterdir())] == [".lock", half.name]
    (record.folder / ".lock").write_text("process 1 on a machine that died")
    assert train(cfg)["status"] == "finished"
    assert not list(record.folder.glob(".*"))


def test_a_lock_file_that_was_removed_before_it_was_locked_does_not_count(tmp_path, monkeypatch):
    """Otherwise two processes could train the run: one with a lock on the removed file, one on a new file."""
    record, lock, removed = Record(tmp_path / "run"), fcntl.flock, []

    def remove_first(*arguments):
        if not removed:
            removed.append(record.lock.unlink())
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with record.alone():
        child = os.fork()
        if not child:
            try:
                lock(open(record.lock, "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: SIM115
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_lock_ends_with_its_process_even_if_a_fork_lives_on(tmp_path):
    code = """
        import os, signal, time
        from pathlib import Path
        from training.record import Record
        with Record(Path(os.environ["RUN"])).alone():
            if child := os.fork():
                Path(os.environ["CHILD"]).write_text(str(child))
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(1), os.close(2)
            time.sleep(600)
    """
    child = tmp_path / "child"
    given = {"RUN": str(tmp_path / "run"), "CHILD": str(child)}
    assert command("-c", textwrap.dedent(code), env=given).returncode == -signal.SIGKILL
    with Record(tmp_path / "run").alone():
        os.kill(int(child.read_text()), signal.SIGKILL)  # raises an error if the child lives no longer


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO])
def test_a_folder_that_cannot_be_locked_is_used_without_a_lock(tmp_path, monkeypatch, capsys, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with Record(tmp_path / "run").alone():
        assert "run cannot be locked: do not train this run in two processes at once" in capsys.readouterr().out
    assert not list((tmp_path / "run").iterdir())


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def write_to_a_full_disk():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # an error of write() does not name the file

    monkeypatch.setattr(platform, "node", write_to_a_full_disk)
    record = Record(tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot write .*/run/\.lock: No space left on device"), record.alone():
        pass
    os.mkfifo(record.lock)
    with pytest.raises(UserError, match=r"cannot write .*/run/\.lock: Not a regular file"), record.alone():
        pass
    assert record.lock.exists()


def test_leftovers_of_a_process_that_was_killed_at_the_end_are_removed(tiny):
    cfg = compose(tiny)
    train(cfg)
    record = Record.of(cfg)
    names = sorted(record.folder.iterdir())
    for path in (record.state, record.lock, record.folder / ".summary.json.12345678.tmp"):
        path.touch()
    train(cfg)
    assert sorted(record.folder.iterdir()) == names


# Inf, NaN and divergence


def test_a_loss_that_overflows_is_reported_with_its_step_and_learning_rate(tiny):
    given = [*tiny, "attn=gmlp", "train.steps=12", "train.log_every=4", "evaluation.every=12", "optim.lr=1e9"]
    cfg = compose([*given, "train.checkpoint_seconds=0"])
    with pytest.raises(UserError) as stopped:
        train(cfg)
    message = str(stopped.value)
    stopped_at = r"the loss, the gradient or a weight is not finite after step \d+: .+ became inf or NaN at step \d+"
    assert re.match(stopped_at, message), message
    assert "learning rate of 9.8e+08" in message  # that of the second step, on the cosine from 1e9
    assert "try a lower optim.lr, optim.warm_up=500 or optim.clip=1.0" in message


@pytest.mark.parametrize("every", [1, 4])
def test_a_loss_that_is_not_finite_from_the_start_is_not_blamed_on_the_learning_rate(every, tiny, monkeypatch):
    monkeypatch.setattr(AFT, "mix", lambda self, x: torch.nan * self.V(x))
    with pytest.raises(
        UserError, match=r"became inf or NaN at step 1.*; the weights were still the initial ones.* aft$"
    ):
        train(compose([*tiny, "attn=aft", f"train.log_every={every}"]))


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("10", r"after step 2 the loss is 2\d{3}, where guessing"),
        ("1", r"after step 4 the loss is \S+, where guessing"),
    ],
)
def test_a_run_that_diverges_says_so_and_is_not_finished(rate, message, tiny):
    """The loss is too large for a finite perplexity, or at the end it is far above that of uniform guessing."""
    cfg = compose([*tiny, "attn=mha", f"optim.lr={rate}", f"optim.min_lr={rate}"])
    for _ in range(2):  # the second time, the run starts again or, if it has saved a state, continues from it
        with pytest.raises(UserError, match=message):
            train(cfg)
        record = Record.of(cfg)
        assert record.read_summary()["status"] == "diverged"
        assert not record.model.exists()
        for line in [record.summary.read_text(), *record.metrics.read_text().splitlines()]:
            json.loads(line, parse_constant=pytest.fail)  # called for Infinity and NaN, which are not JSON
    data = dashboard.collect(folder_of(cfg), folder_of(cfg))
    status = [column["label"] for column in data["columns"]].index("status")
    assert data["runs"][0]["cells"][status].startswith("diverged")


@pytest.mark.parametrize("name", ["heldout", "sliding"])
def test_a_final_loss_that_is_not_finite_is_a_divergence(name, tiny, monkeypatch):
    def evaluate_badly(*args):
        result = evaluate(*args)
        return result | {name: result[name] | {"loss": math.nan, "perplexity": math.nan}}

    monkeypatch.setattr("training.trainer.evaluate", evaluate_badly)
    cfg = compose(tiny)
    with pytest.raises(UserError, match="is not finite after step 4"):
        train(cfg)
    assert Record.of(cfg).read_summary()["status"] == "diverged"


def test_what_was_measured_during_training_is_deleted_at_its_end(tiny):
    cfg = compose(tiny)
    early = Record.of(cfg).folder / "evaluation.json"

    def measure(trainer):
        early.write_text("{}")

    train(cfg, measure)
    assert not early.exists()


def test_long_windows_are_evaluated_in_smaller_batches(tiny, monkeypatch):
    model, windows = build_model(compose(tiny), 50), torch.randint(50, (5, 17))
    sizes = []
    model.register_forward_pre_hook(lambda _, ids: sizes.append(len(ids[0])))
    whole = score(model, windows, None, torch.device("cpu"))
    monkeypatch.setattr("training.evaluation.CHARACTERS", 40)
    parts = score(model, windows, None, torch.device("cpu"))
    assert sizes == [5, 2, 2, 1]
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_a_gradient_that_is_not_finite_ends_the_run(tiny):
    def spoil(trainer):
        trainer.model.head.weight.register_hook(lambda gradient: gradient * torch.inf)

    with pytest.raises(UserError, match=r"the loss, the gradient or a weight is not finite after step 1"):
        train(compose([*tiny, "optim.clip=1.0"]), spoil)


def test_a_nan_is_found_in_the_layer_and_step_where_it_began(tiny, monkeypatch):
    cfg = compose([*tiny, "attn=aft", "train.steps=9", "train.log_every=9", "evaluation.every=9"])
    forward = GLU.forward
    steps = itertools.count()

    # Finite only in its first five calls: two in the causality check, and steps 1 to 3. The search, which repeats step
    # 1, meets a NaN at once.
    def broken(self, x, carry=None):
        y, carry = forward(self, x, carry)
        return (y if next(steps) < 5 else y * float("nan")), carry

    monkeypatch.setattr(GLU, "forward", broken)
    monkeypatch.setattr(training.trainer, "counted_costs", lambda *_: {})  # it would also run a forward pass
    with pytest.raises(UserError, match=r"the output of blocks\.0\.ffn became inf or NaN at step 1"):
        train(cfg)


def test_the_search_for_the_first_nan_uses_the_parts_of_the_batch(tiny, monkeypatch, capsys):
    rest = [a for a in tiny if a.split("=")[0] not in ("train.batch", "train.accumulate")]
    cfg = compose([*rest, "train.batch=4", "train.accumulate=2", "train.log_every=2"])
    forward, passes, widths = GLU.forward, itertools.count(), set()

    def broken(self, x, carry=None):  # in training, finite only in the first of the two parts of each step
        y, carry = forward(self, x, carry)
        if not self.training:
            return y, carry
        widths.add(len(x))
        return (y * float("nan") if next(passes) % 2 else y), carry

    monkeypatch.setattr(GLU, "forward", broken)
    monkeypatch.setattr(training.trainer, "counted_costs", lambda *_: {})  # it would also run a forward pass
    with pytest.raises(UserError, match=r"the output of blocks\.0\.ffn became inf or NaN at step 1"):
        train(cfg)
    assert widths == {2}
    assert "looking for the first inf or NaN" in capsys.readouterr().out


def test_a_signal_ends_the_search_for_the_first_nan(tiny):
    """The signal comes in the third of the eight steps that are repeated, so steps 1 to 3 are known to be good."""
    cfg = compose([*tiny, "train.steps=8", "train.log_every=8", "evaluation.every=8"])
    steps = itertools.count(1)

    def eventful(trainer):
        step = next(steps)
        if step == 8 + 3:
            signal.raise_signal(signal.SIGINT)
        if step in (8, 8 + 8):
            with torch.no_grad():
                trainer.model.head.weight.fill_(torch.nan)

    message = r"after step 8: one of these became inf or NaN between steps 3 and 8"
    with pytest.raises(UserError, match=message):
        train(cfg, eventful)
    assert next(steps) == 8 + 4


def test_a_signal_before_the_search_for_the_first_nan_leaves_it_open_when_this_happened(tiny):
    cfg = compose([*tiny, "train.steps=8", "train.log_every=8", "evaluation.every=8"])

    def eventful(trainer):
        if trainer.step == 5:
            signal.raise_signal(signal.SIGINT)
            with torch.no_grad():
                trainer.model.head.weight.fill_(torch.nan)

    with pytest.raises(UserError, match=r"became inf or NaN between steps 0 and \d.* try a lower optim\.lr"):
        train(cfg, eventful)


def test_the_last_good_state_stays_when_a_weight_becomes_infinite(tiny):
    cfg = compose([*tiny, "train.steps=8", "train.log_every=2", "evaluation.every=8", "train.checkpoint_seconds=0"])

    def make_infinite(optimizer, *_):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].fill_(torch.inf)

    def make_infinite_after_step_6(trainer):
        if trainer.step == 5:
            trainer.optimizer.register_step_post_hook(make_infinite)

    with pytest.raises(UserError, match="the run's last good state stays in"):
        train(cfg, make_infinite_after_step_6)
    state = torch.load(Record.of(cfg).state, weights_only=True)
    assert state["step"] == 4  # the last one whose loss was looked at
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert train(cfg)["status"] == "finished"  # from that state


def test_clipping_bounds_the_step_and_is_logged(tiny):
    cfg = compose([*tiny, "optim.clip=0.5", "train.steps=2"])
    train(cfg)
    rows = Record.of(cfg).rows()
    assert all(row["gradient_norm"] > 0 for row in rows)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    x = 100 * torch.ones(4, 3)
    _, norm = update(lambda x, _: model(x).sum(), optimizer, x, x, torch.device("cpu"), "float32", 1, 0.5)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).norm() == pytest.approx(0.5, rel=1e-4)
    assert norm > 100

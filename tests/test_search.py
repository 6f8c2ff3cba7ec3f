"""scripts.search: the space of forms, the rungs, continuing after an interruption, and the page."""

import contextlib
import itertools
import json
import math
import random
import shlex

import optuna
import pytest
import torch
from omegaconf import OmegaConf
from optuna.trial import FixedTrial

from configs.cli import compose
from models.build import instantiate_model
from scripts import search
from scripts.reporting import search as page
from scripts.studies.forms import KEYS, OF_SCORES, POSITIONS, RECEPTANCES, SCORES, SHIFTS, suggest
from tests.conftest import ROOT
from training.packed import find

NAMED = {"AFT": "attn=aft", "MHA+": "attn=mha_plus attn.rotary=0.5"}


def every_form() -> list[tuple[str, ...]]:
    """Return all forms that scripts/studies/forms.py can suggest."""
    forms = []
    for content, R, shift, rotary, mixed in itertools.product(
        (*KEYS, *SCORES), RECEPTANCES, SHIFTS, (False, True), (False, True)
    ):
        for position in POSITIONS if content in KEYS else OF_SCORES:
            name = "position_of_keys" if content in KEYS else "position_of_scores"
            chosen = {"content": content, name: position, "R": R, "shift": shift}
            forms.append(suggest(FixedTrial(chosen | {"rotary": rotary, "talking_heads": mixed})))
    return list(dict.fromkeys(forms))


def test_the_number_of_forms_and_the_models_and_names_of_thirty_of_them():
    forms = every_form()
    # Contents of keys, positions, R and shifts; and for scores positions, R, shifts, and the choices of rotary and
    # talking heads with exp_qk, phi_qk and qk.
    assert len(forms) == 2 * 5 * 4 * 3 + 4 * 4 * 3 * (4 + 2 + 4)
    names = set()
    for form in random.Random(1).sample(forms, 30):
        cfg = compose([*page.overrides(form, 500, 0.002)])
        names.add(cfg.job.name)
        with torch.device("meta"):
            model = instantiate_model(cfg, 50)
        assert model.blocks[0].attn.impl == "torch"
    assert len(names) == 30


@pytest.fixture
def cfg(tmp_path):
    small = ["trials=4", "batch=2", "rungs=[5,10]", "keep=[2]", f"results={tmp_path}"]
    cfg = compose(small, "search")
    OmegaConf.set_struct(cfg, False)
    cfg.named = NAMED
    return cfg


class Trained:
    """Replaces training: writes records whose loss is computed from the run's name.

    `jobs` are those that were trained. After `limit` of them, KeyboardInterrupt is raised.
    """

    def __init__(self):
        self.jobs, self.limit = [], math.inf

    def __call__(self, jobs, cfg):
        for job in jobs:
            if len(self.jobs) >= self.limit:
                raise KeyboardInterrupt
            self.jobs.append(job)
            made = compose(list(job.overrides))
            job.record.folder.mkdir(parents=True)
            summary = find(ROOT / "results/runs/small/aft-lr=0.002-seed0").read_summary()
            summary |= {"name": made.job.name, "steps": made.train.steps, "lr": made.optim.lr, "seed": made.seed}
            summary["command"] = shlex.join(["python", "train.py", *job.overrides])
            loss = 1 + random.Random(made.job.name).random()
            for text in ("fit", "heldout"):
                summary["evaluation"][text] |= {"loss": loss, "perplexity": math.exp(loss)}
            (job.record.folder / "summary.json").write_text(json.dumps(summary))
            OmegaConf.save(made, job.record.folder / "config.yaml")
        return contextlib.nullcontext()


@pytest.fixture
def trained(monkeypatch):
    trained = Trained()
    monkeypatch.setattr(search, "train_missing", trained)
    return trained


def steps_of(job) -> int:
    return next(int(word.removeprefix("train.steps=")) for word in job.overrides if word.startswith("train.steps="))


@pytest.mark.slow
def test_a_rung_has_the_best_forms_of_the_one_before_and_the_named_forms(cfg, trained):
    search.search_all_rungs(cfg)
    ranked = page.rungs(cfg)
    first, second = ranked.values()
    runs = [job for job in trained.jobs if steps_of(job) == 10]
    assert len(runs) == 2 * (len(NAMED) + 2)  # each form at both learning rates
    assert len(second) == len(NAMED) + 2
    assert [page.fit(summary) for summary in first] == sorted(page.fit(summary) for summary in first)
    assert len({job.record.folder for job in trained.jobs}) == len(trained.jobs)
    best, kept = (
        [page.form_in_words(s["command"]) for s in rung if s["name"].startswith("rwv")] for rung in (first, second)
    )
    assert set(best[:2]) == set(kept)
    text = page.page(cfg, ranked)
    assert "**AFT**" in text
    assert "## 10 steps: 4 forms" in text


@pytest.mark.slow
@pytest.mark.parametrize("limit", [3, 6, 13])
def test_the_same_command_continues_a_search(cfg, trained, limit):
    trained.limit = limit
    with pytest.raises(KeyboardInterrupt):
        search.search_all_rungs(cfg)
    trained.limit = math.inf
    search.search_all_rungs(cfg)
    assert len({job.record.folder for job in trained.jobs}) == len(trained.jobs)  # none was trained twice
    study = optuna.load_study(storage=f"sqlite:///{cfg.results}/search.db", study_name=search.study_name(cfg))
    assert sum(trial.state.name == "COMPLETE" for trial in study.trials) == 4
    before = len(trained.jobs)
    search.search_all_rungs(cfg)
    assert len(trained.jobs) == before


@pytest.mark.slow
def test_a_search_with_another_seed_chooses_forms_of_its_own(cfg, trained):
    search.search_all_rungs(cfg)
    before = len(trained.jobs)
    cfg.seed += 1
    search.search_all_rungs(cfg)
    assert sum(steps_of(job) == 5 and job.record.folder.name.startswith("rwv") for job in trained.jobs[before:]) > 0


@pytest.mark.slow
def test_a_search_that_was_killed_while_it_chose_a_form_continues(cfg, trained):
    study = optuna.create_study(storage=f"sqlite:///{cfg.results}/search.db", study_name=search.study_name(cfg))
    study.ask().suggest_categorical("content", [*KEYS, *SCORES])
    search.first_rung(cfg)
    states = [trial.state.name for trial in study.trials]
    assert states == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]  # the failed one counts towards cfg.trials


def test_keep_and_rungs_must_fit(cfg):
    cfg.keep = [3, 2]
    with pytest.raises(search.UserError, match="keep needs one number for each rung after the first"):
        search.search_all_rungs(cfg)

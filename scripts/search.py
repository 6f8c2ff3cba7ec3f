"""python -m scripts.search: search for the best R, W and token shift of attn=rwv by successive halving.

In the first rung, Optuna's TPE sampler chooses forms from the space of scripts/studies/forms.py. Each later rung takes
the best forms of the rung before it, and trains them from scratch with more steps. The named forms of
configs/search.yaml train in every rung. out/search.md ranks the finished forms of each rung. The same command continues
a search that was stopped: Optuna's study is in out/search.db, and runs that have ended are not trained again. A search
with another seed, other learning rates or another number of steps in the first rung begins a study of its own there.
"""

import sys
from pathlib import Path

import configs.startup

from omegaconf import DictConfig

try:
    import optuna
    from optuna.trial import FixedTrial, FrozenTrial, TrialState
except ImportError:
    sys.exit("error: optuna is needed: pip install -r requirements-extra.txt")

from configs.cli import main
from data.files import UserError
from scripts.reporting import search
from scripts.reporting.search import Form, loss_of, named, overrides
from scripts.studies.forms import suggest
from scripts.studies.runner import missing, train_missing


def train_forms(forms: list[Form], steps: int, cfg: DictConfig) -> None:
    """Train the missing runs of the forms. Raises UserError if a run ends neither finished nor diverged."""
    runs = [(overrides(form, steps, rate), cfg.seed) for form in forms for rate in cfg.learning_rates]
    with train_missing(missing(runs, cfg), cfg):
        pass


def form_of(trial: FrozenTrial) -> Form | None:
    """Return the form of a trial; None if only a part of it was chosen, or if forms.py no longer knows it."""
    try:
        return suggest(FixedTrial(trial.params))
    except ValueError:
        return None


def study_name(cfg: DictConfig) -> str:
    """Return the name of Optuna's study. It differs between searches whose losses cannot be compared."""
    return f"seed {cfg.seed}, {cfg.rungs[0]} steps, learning rates {', '.join(f'{r:g}' for r in cfg.learning_rates)}"


def first_rung(cfg: DictConfig) -> list[Form]:
    """Train the forms that Optuna chooses in cfg.trials trials, and return these forms, each once."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    Path(cfg.results).mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{cfg.results}/search.db"
    study = optuna.create_study(storage=storage, study_name=study_name(cfg), load_if_exists=True)
    while True:
        stopped = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        ended = len(study.trials) - len(stopped)
        study.sampler = optuna.samplers.TPESampler(seed=cfg.seed + ended, constant_liar=True)
        forms = {trial.number: form for trial in stopped if (form := form_of(trial))}
        for trial in stopped:
            if trial.number not in forms:
                study.tell(trial.number, state=TrialState.FAIL)
        while len(forms) < cfg.batch and ended + len(forms) < cfg.trials:
            trial = study.ask()
            forms[trial.number] = suggest(trial)
        if not forms:
            return list(dict.fromkeys(filter(None, map(form_of, study.trials))))
        train_forms(list(forms.values()), cfg.rungs[0], cfg)
        for number, form in forms.items():
            loss = loss_of(form, cfg.rungs[0], cfg)
            study.tell(number, loss, state=TrialState.FAIL if loss is None else TrialState.COMPLETE)


def best(forms: list[Form], steps: int, count: int, cfg: DictConfig) -> list[Form]:
    """Return the `count` forms with the lowest losses in a rung, leaving out those that have diverged at every rate."""
    losses = {form: loss_of(form, steps, cfg) for form in forms}
    return sorted((form for form in forms if losses[form] is not None), key=losses.__getitem__)[:count]


def search_all_rungs(cfg: DictConfig) -> None:
    """Train the missing runs of all rungs. Raises UserError if `keep` is not exactly one entry shorter than `rungs`."""
    if len(cfg.keep) != len(cfg.rungs) - 1:
        raise UserError(f"keep needs one number for each rung after the first: got {cfg.keep} for rungs={cfg.rungs}")
    train_forms(list(named(cfg).values()), cfg.rungs[0], cfg)
    forms = first_rung(cfg)
    for before, steps, count in zip(cfg.rungs, cfg.rungs[1:], cfg.keep, strict=False):
        forms = best(forms, before, count, cfg)
        train_forms([*named(cfg).values(), *forms], steps, cfg)


@main("search")
def run(cfg: DictConfig) -> None:
    search_all_rungs(cfg)
    search.write(cfg)
    print(f"written to {cfg.results}/search.md")


if __name__ == "__main__":
    run()

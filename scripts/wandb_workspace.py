"""python -m scripts.wandb_workspace entity=NAME: save a view of the wandb project that compares runs.

This command needs a wandb account, runs that were synced to it, and requirements-extra.txt. scripts.dashboard and
`wandb leet out/leet` show runs without an account.
"""

import configs.startup

import wandb
from omegaconf import DictConfig

from configs.cli import main
from data.files import UserError, first_line

TEXTS = {"fit_perplexity": "training text", "heldout_perplexity": "held-out text"}
AXES = {"tokens": "characters trained on", "seconds": "seconds of training"}
COLUMNS = ("fit_perplexity", "heldout_perplexity", "sliding_perplexity", "tokens_per_second", "parameters")
ACCURACY = "heldout_accuracy"  # of runs on synthetic texts


def workspace(entity: str, project: str, name: str):
    """Return a view of perplexities, accuracies and speeds, in which runs are grouped by experiment.

    Raises UserError if wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise UserError(f"{error.name} is needed: pip install -r requirements-extra.txt") from error

    plots = [
        panels.LinePlot(
            title=f"Perplexity, {text}", x=x, y=[f"eval/{y}"], log_y=True, title_x=axis, title_y="perplexity"
        )
        for y, text in TEXTS.items()
        for x, axis in AXES.items()
    ]
    accuracy = [
        panels.LinePlot(title="Accuracy, held-out text", x=x, y=[f"eval/{ACCURACY}"], title_x=axis, title_y="accuracy")
        for x, axis in AXES.items()
    ]
    speed = panels.BarPlot(title="Characters a second", metrics=["tokens_per_second"])
    sections = {"Perplexity": plots, "Accuracy": accuracy, "Speed": [speed]}
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(name=title, panels=of_it, is_open=True) for title, of_it in sections.items()],
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Metric("Group")],
            order=[ws.Ordering(ws.Summary("fit_perplexity"), ascending=True)],
            pinned_columns=[
                *(f"summary:{column}" for column in (*COLUMNS, ACCURACY)),
                "config:attn.value",
                "config:seed.value",
            ],
        ),
    )


@main("wandb_workspace")
def run(cfg: DictConfig) -> None:
    view = workspace(cfg.entity, cfg.project, cfg.name)
    try:
        wandb.Api(timeout=20)
    except wandb.errors.UsageError as error:
        raise UserError(
            "this needs a wandb account: wandb login first, or use make dashboard, which needs no account"
        ) from error
    except wandb.errors.Error as error:  # the service rejects the key, or cannot be reached
        raise UserError(f"wandb cannot be reached or rejects the key: {first_line(error)}") from error
    try:
        view.save()
    except Exception as error:  # an error of the network or the service
        raise UserError(f"wandb did not save the view: {first_line(error)}") from error
    print(view.url)


if __name__ == "__main__":
    run()

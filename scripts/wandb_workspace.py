"""python -m scripts.wandb_workspace entity=NAME: save a view of the project that compares runs at a glance.

It needs a wandb account, runs that were synced to it, and requirements-extra.txt. Without an
account there are scripts.dashboard and `wandb leet out/wandb`.
"""

import configs.startup

import wandb
from omegaconf import DictConfig

from configs.cli import main
from data.files import UserError

TEXTS = {"fit_perplexity": "training text", "heldout_perplexity": "held-out text"}
AXES = {"tokens": "characters trained on", "seconds": "seconds of training"}
COLUMNS = ("fit_perplexity", "heldout_perplexity", "sliding_perplexity", "tokens_per_second", "parameters")


def workspace(entity: str, project: str, name: str):
    """Runs grouped by experiment; perplexity against characters and time; the summaries' columns.

    Errors: UserError where wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise UserError(f"{error.name} is needed: pip install -r requirements-extra.txt") from error

    plots = [
        panels.LinePlot(title=f"Perplexity, {text}", x=x, y=[y], log_y=True, title_x=axis, title_y="perplexity")
        for y, text in TEXTS.items()
        for x, axis in AXES.items()
    ]
    speed = panels.BarPlot(title="Characters a second", metrics=["tokens_per_second"])
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name="Perplexity", panels=plots, is_open=True),
            ws.Section(name="Speed", panels=[speed], is_open=True),
        ],
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Metric("Group")],
            order=[ws.Ordering(ws.Summary("fit_perplexity"), ascending=True)],
            pinned_columns=[*(f"summary:{column}" for column in COLUMNS), "config:attn.value", "config:seed.value"],
        ),
    )


@main("workspace")
def run(cfg: DictConfig) -> None:
    view = workspace(cfg.entity, cfg.project, cfg.name)
    try:
        wandb.Api(timeout=20)
    except wandb.errors.UsageError as error:
        raise UserError(
            "this needs a wandb account: wandb login first; without one, make dashboard shows the runs"
        ) from error
    try:
        view.save()
    except Exception as error:  # whatever the network or the service says
        raise UserError(f"wandb did not take the view: {str(error).splitlines()[0]}") from error
    print(view.url)


if __name__ == "__main__":
    run()

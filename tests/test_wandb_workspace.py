"""The saved view of wandb: its contents, and the message without an account."""

from scripts.wandb_workspace import workspace
from tests.conftest import command


def test_the_view_compares_runs_by_experiment_against_characters_and_time():
    view = workspace("me", "rwv-lab", "view")
    assert [group.name for group in view.runset_settings.groupby] == ["Group"]
    plots = view.sections[0].panels
    drawn = {(str(plot.x), str(plot.y[0])) for plot in plots}
    assert len(drawn) == 4
    assert all("eval/" in y for _, y in drawn)  # as training/wandb_mirror.py names them
    assert all(any(axis in x for x, _ in drawn) for axis in ("tokens", "seconds"))
    assert "summary:fit_perplexity" in view.runset_settings.pinned_columns
    view._to_model()  # what save() sends


def test_a_service_that_cannot_be_reached_is_named_in_one_line(tmp_path):
    key = {"WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    done = command("-m", "scripts.wandb_workspace", "entity=me", env=key)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: wandb cannot be reached or rejects the key: ")
    assert "Traceback" not in done.stderr


def test_without_an_account_it_says_so(tmp_path):
    nobody = {"WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    done = command("-m", "scripts.wandb_workspace", "entity=me", env=nobody)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: this needs a wandb account: wandb login first")
    assert "Traceback" not in done.stderr

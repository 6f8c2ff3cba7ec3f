"""The weights of small models that are committed, the notebook that uses them, and how weights are packed."""

import json
import shutil

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from configs.cli import compose
from data.files import UserError
from data.reading import read_tensors
from scripts.pack_runs import halved_weights, write_weights
from tests.conftest import ROOT, command, tiny_run
from train import train
from training.loading import load_run
from training.packed import find
from training.record import Record

pytestmark = pytest.mark.slow

WEIGHTS = sorted((ROOT / "results/weights").iterdir())


@pytest.mark.parametrize("folder", WEIGHTS, ids=lambda folder: folder.name)
def test_committed_weights_belong_to_a_committed_run_and_write_text(folder):
    kept, run = Record(folder), load_run(folder)
    packed = find(ROOT / "results/runs" / run.cfg.job.experiment / run.cfg.job.name)
    different = {"weights_sha256", "text_sha256"}  # these weights are rounded, and the text is not kept
    ours, theirs = ({k: v for k, v in r.read_summary().items() if k not in different} for r in (kept, packed))
    assert ours == theirs
    assert run.cfg.job.attn == folder.name
    assert {tensor.dtype for tensor in read_tensors(kept.model).values()} == {torch.float16}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    text = run.write("曹操", 40)
    assert text.startswith("曹操")
    assert len(set(text)) > 10


def test_scripts_sample_writes_text_with_committed_weights():
    done = command("-m", "scripts.sample", f"run={WEIGHTS[0]}", "prompt=曹操", "length=20")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.strip()) == 22


def test_weights_without_their_text_are_not_evaluated():
    done = command("evaluate.py", f"run={WEIGHTS[0]}")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {WEIGHTS[0]} holds no text to evaluate on, because committed weights are kept without it: "
        "run the command in its summary.json, and evaluate the new run\n"
    )


def kinds(notebook) -> list[set[str]]:
    """Return the kinds of output of each cell, such as stream for printed text, or display_data for figures."""
    return [{output.output_type for output in cell.get("outputs", [])} for cell in notebook.cells]


def test_the_notebook_runs():
    notebook = nbformat.read(ROOT / "results/tour.ipynb", as_version=4)
    committed, printed = kinds(notebook), notebook.cells[1].outputs[0].text
    assert sum(map(len, committed)) >= 5  # the notebook is committed with its outputs
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "results")}}).execute()
    assert kinds(notebook) == committed
    assert notebook.cells[1].outputs[0].text == printed  # it comes from committed records


@pytest.fixture(scope="module")
def trained_once(text, tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    for seed in (0, 1):
        train(compose(["attn=aft", "experiment=small", f"seed={seed}", *tiny_run(text, place)]))
    return place / "runs"


@pytest.fixture
def trained(trained_once, tmp_path):
    """Return the folder of two finished runs of one attention."""
    return shutil.copytree(trained_once, tmp_path / "runs")


def test_weights_are_packed_in_half_precision_from_one_run_of_each_attention(trained, tmp_path):
    write_weights(halved_weights(trained, "*seed1", tmp_path / "weights", False))
    (folder,) = (tmp_path / "weights").iterdir()
    (full,) = trained.rglob("*seed1")
    ours, theirs = (load_run(place).model.state_dict() for place in (folder, full))
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.half().float()), name
    with pytest.raises(UserError, match="only one run of each attention can have its weights kept"):
        halved_weights(trained, "*", tmp_path / "others", False)
    refused = command("-m", "scripts.pack_runs", f"runs={trained}", f"out={tmp_path}/o", f"weights={tmp_path}/others")
    assert refused.returncode == 2
    assert not (tmp_path / "others").exists()
    assert not (tmp_path / "o").exists()
    with pytest.raises(UserError, match="holds weights: overwrite=true replaces them"):
        halved_weights(trained, "*seed0", tmp_path / "weights", False)
    write_weights(halved_weights(trained, "*seed0", tmp_path / "weights", True))
    assert Record(folder).read_summary()["seed"] == 0


def test_weights_beyond_half_precision_are_refused(trained, tmp_path):
    (full,) = trained.rglob("*seed1")
    record = Record(full)
    weights = read_tensors(record.model)
    weights["embed.weight"][0, 0] = 1e6
    record.save_model(weights)
    with pytest.raises(UserError, match="holds numbers beyond the range of half precision"):
        halved_weights(trained, "*seed1", tmp_path / "weights", False)
    assert not (tmp_path / "weights").exists()


def test_a_run_that_has_lost_its_text_is_refused(trained):
    (full,) = trained.rglob("*seed1")
    assert "text_sha256" in json.loads((full / "summary.json").read_text())
    Record(full).text.unlink()
    with pytest.raises(UserError, match=r"text\.safetensors"):
        load_run(full)

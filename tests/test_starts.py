"""study=starts: the initialisations that it compares, what it measures of heads, and its page."""

import math
import re

import pytest
import torch
from omegaconf import OmegaConf

from configs.cli import compose
from data.files import UserError, write_bytes
from data.reading import read_json
from models.build import build_model
from scripts.reporting import starts as starts_page
from scripts.reporting.records import checked_record, finished
from scripts.studies import runner, starts
from scripts.studies.heads import measured, similarity
from tests.conftest import TINY
from train import train
from training.loading import config_of
from training.record import Record

pytestmark = pytest.mark.slow

STARTS = {
    "mha_plus": {
        "plain": "attn.initial_head_mix=identity model.init_std=0.02",
        "random head mix": "attn.initial_head_mix=uniform",
    },
    "mha": {"plain": "model.init_std=0.02", "twice the std": "model.init_std=0.04"},
}


@pytest.fixture
def small(tiny, tmp_path, monkeypatch):
    """Return a config of study=starts for tiny models, and a list to which the names of the trained runs are added."""
    trained = []

    def one_by_one(jobs, *_, **__):
        for job in jobs:
            train(compose(list(job.overrides)))
            trained.append(job.record.folder.name)

    places = [word for word in tiny if not word.startswith(("runs=", "train.steps="))]
    words = starts_page.words
    settings = [*places, "train.steps=6", f"runs={tmp_path}/runs"]
    for module in (starts, starts_page):
        monkeypatch.setattr(module, "words", lambda *given: (*words(*given), *settings))
    monkeypatch.setattr(runner, "train_all", one_by_one)
    monkeypatch.setattr(starts_page, "CONFIGS", tmp_path / "configs")
    given = ["study=starts", "setup=small", "stop=4", "seeds=[1,2]", "look_steps=[0,3]", f"results={tmp_path}"]
    cfg = compose(given, "reproduce")
    cfg.starts = STARTS
    return cfg, trained


def test_starts_are_trained_once_and_the_page_comes_from_their_records(small, tmp_path):
    cfg, trained = small
    starts.compare(cfg)
    page = (tmp_path / "starts_small.md").read_text(encoding="utf-8")
    heads = read_json(tmp_path / "starts_small_heads.json")
    assert len(trained) == len(set(trained)) == 8
    assert (tmp_path / "starts_small.svg").exists()
    assert [row["step"] for row in heads["found"]["random head mix"]] == [0, 3]
    losses = {}
    for name in trained:
        summary = read_json(tmp_path / f"runs/small/{name}/summary.json")
        assert summary["steps"] == 4
        model = OmegaConf.load(tmp_path / f"runs/small/{name}/config.yaml")
        changed = model.model.init_std == 0.04 or model.attn.initial_head_mix == "uniform"
        losses.setdefault((summary["attn"], changed), []).append(summary["evaluation"]["fit"]["loss"])
    for attn, label in (("mha_plus", "MHA+"), ("mha", "MHA")):
        plain, other = (sum(losses[attn, changed]) / 2 for changed in (False, True))
        section = page.split(f"## {label}\n")[1].split("## ")[0]
        best = "plain" if plain < other else list(STARTS[attn])[1]
        assert f"Best on the whole text after 4 steps: `{best}`." in section
        chosen = tmp_path / f"configs/starts/small/{attn}.yaml"
        assert chosen.exists() == (best != "plain")
        if chosen.exists():
            key, value = STARTS[attn][best].split("=")
            assert str(OmegaConf.select(OmegaConf.load(chosen), key)) == value
            assert chosen.read_text(encoding="utf-8").startswith("# @package _global_\n# From python -m ")
            assert f"plain {math.exp(plain):.2f}" in chosen.read_text(encoding="utf-8")
        assert f"{math.exp(plain):.2f} |" in section
        assert f"{math.exp(plain - min(plain, other)):.2f} |" in section
    starts.compare(cfg)
    assert len(trained) == 8
    assert (tmp_path / "starts_small.md").read_text(encoding="utf-8") == page


def test_a_diverged_start_is_shown_and_not_trained_again(small, tmp_path):
    cfg, trained = small
    starts.compare(cfg)
    plain = [name for name in trained if name.startswith("mha-") and "std=0.04" not in name]
    path = tmp_path / f"runs/small/{plain[0]}/summary.json"
    path.write_text(path.read_text().replace('"finished"', '"diverged"'))
    starts.compare(cfg)
    assert len(trained) == 8
    page = (tmp_path / "starts_small.md").read_text(encoding="utf-8")
    assert "Best on the whole text after 4 steps: `twice the std`. The plain start has diverged." in page
    assert re.search(r"\| plain +\| +– .* diverged \| +diverged \| `model\.init_std=0\.02`", page)
    chosen = (tmp_path / "configs/starts/small/mha.yaml").read_text(encoding="utf-8")
    assert "plain diverged; twice the std" in " ".join(chosen.replace("\n# ", " ").split())


def test_the_overview_has_a_row_for_each_attention(small, tmp_path):
    cfg, _ = small
    cfg.starts.mha = cfg.usual
    starts.compare(cfg)
    page = (tmp_path / "starts_small.md").read_text(encoding="utf-8")
    assert "## MHA+\n" in page
    assert "## MHA\n" not in page  # the overview shows all of its starts
    cells = [cell.strip() for cell in re.search(r"^\| MHA +\|(.+)\|$", page, re.MULTILINE)[1].split("|")]
    losses = [[run["evaluation"]["fit"]["loss"] for run in each.summaries] for each in starts_page.starts(cfg)["mha"]]
    plain, best = losses[0], min(losses, key=sum)
    assert cells[0] == "0.002"
    assert [cell.strip("*") for cell in cells[1:4]] == [f"{math.exp(sum(each) / 2):.2f}" for each in losses]
    assert cells[losses.index(best) + 1].startswith("**")
    assert cells[5] == f"{math.exp(sum(best) / 2):.2f}"
    assert cells[7] == ", ".join(f"{math.exp(one - other):.3f}" for one, other in zip(plain, best, strict=True))
    chosen = tmp_path / "configs/starts/small/mha.yaml"
    assert cells[8].strip("`") == (cells[4].strip("`") if chosen.exists() else "plain")


def test_the_page_says_which_starts_were_trained_in_bf16():
    run = {"precision": "float32"}
    plain, other = (starts_page.Start(name, "", [run], 1.0, {}) for name in ("plain", "twice the std"))
    assert starts_page.in_bf16({"mha": [plain, other]}) == ""
    note = starts_page.in_bf16({"mha": [plain._replace(summaries=[run, {"precision": "bf16"}]), other]})
    assert note.startswith(
        "Trained in bf16, at least with one seed: MHA `plain`. All others were trained in float32. ["
    )


def test_a_chosen_start_with_a_truth_value_is_found_again(monkeypatch, tmp_path):
    words = "attn.position_weight.initial_f=ones attn.position_weight.positive=false"
    path = tmp_path / "aft.yaml"
    OmegaConf.save(OmegaConf.from_dotlist(words.split()), path)
    monkeypatch.setattr(starts_page, "start_file", lambda setup, variant: path)
    cfg = OmegaConf.create({"setup": "small", "starts": {"aft": {"plain": "", "free w": words}}})
    assert starts_page.chosen_start("small", "aft") == words
    assert starts_page.start_in_use(cfg, "aft") == "free w"


def test_a_start_that_was_not_tried_is_named_and_nothing_is_chosen(small, tmp_path):
    cfg, trained = small
    cfg.choose = False
    starts.compare(cfg)
    assert not (tmp_path / "configs").exists()
    page = (tmp_path / "starts_small.md").read_text(encoding="utf-8")
    assert "Not tried" not in page
    cfg.starts.mha_plus["free w"] = "attn.position_weight.positive=false"
    starts.choose(cfg, ["mha_plus"])
    starts_page.write(cfg)
    assert not (tmp_path / "configs/starts/small/mha_plus.yaml").exists()
    page = (tmp_path / "starts_small.md").read_text(encoding="utf-8")
    assert "- Not tried: MHA+ `free w`.\n" in page
    assert "## MHA+\n" in page
    assert len(trained) == 8


def test_only_the_starts_of_the_asked_attentions_are_chosen(small, tmp_path):
    cfg, _ = small
    cfg.choose = False
    starts.compare(cfg)
    path = tmp_path / "configs/starts/small/mha_plus.yaml"
    write_bytes(path, b"earlier")
    cfg.choose = True
    for variants, kept in ((["mha"], True), (None, False)):
        cfg.variants = variants
        starts.compare(cfg)
        assert (path.exists() and path.read_text(encoding="utf-8") == "earlier") == kept


def test_a_run_with_another_start_than_its_name_says_is_refused(small, tmp_path):
    cfg, trained = small
    starts.compare(cfg)
    path = tmp_path / f"runs/small/{trained[0]}/config.yaml"
    path.write_text(path.read_text().replace("initial_head_mix: identity", "initial_head_mix: uniform"))
    with pytest.raises(UserError, match=r"was trained with another attn.initial_head_mix than its name says"):
        starts_page.write(cfg)


def test_every_start_has_a_model_and_a_run_with_its_own_name():
    cfg = compose(["study=starts"], "reproduce")
    for variant in cfg.starts:
        names = set()
        for start in cfg.starts[variant]:
            composed = compose([*starts_page.words(cfg, variant, start), "seed=100"])
            assert (composed.train.stop, composed.train.steps) == (200, 700)
            assert composed.optim.lr == starts_page.rate_of("novel", variant)
            names.add(composed.job.name)
            with torch.device("meta"):
                build_model(composed, 50)
        assert len(names) == len(cfg.starts[variant])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["variants=[rwv]"], "there are no starts of attn=rwv; there are those of mha_plus, gmlp"),
        (["look=[x]"], "mha_plus has no start x; it has plain, random head mix"),
        (["seeds=[]"], "seeds must not be empty"),
        (["setup=cpu", "stop=9", "seeds=[1]"], "setup must be one of novel, small: got cpu"),
    ],
)
def test_unknown_starts_and_setups_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        starts.check(compose(["study=starts", *given], "reproduce"))


def test_equal_heads_are_alike():
    """All heads get the Q, K and V of head 0, and one of the three rows of the head mix sums to 0."""
    torch.manual_seed(0)
    model = build_model(compose([*TINY, "attn=mha_plus", "model.init_std=0.5"]), 40)
    attn, windows = model.blocks[0].attn, torch.randint(40, (4, 17))
    before = measured(model, windows)
    assert before["mean passed"] == 1
    with torch.no_grad():
        for linear in (attn.Q, attn.K, attn.V):
            linear.weight[8:16] = linear.weight[:8]
            linear.weight[16:] = linear.weight[:8]
        attn.mix_weights[2] = torch.tensor([0.5, 0.5, -1.0])
    after = measured(model, windows)
    assert before["alike"] < 0.9 < after["alike"] == pytest.approx(1, abs=1e-4)
    assert after["mean passed"] == pytest.approx(2 / 3)
    assert before["outputs alike"] < 0.9
    assert all(after[key] > 0 for key in ("gradient of M", "gradient of Q and K", "gradient of V", "logits", "apart"))


def test_similarity_ignores_rotation_scale_and_offset():
    x = torch.randn(50, 4)
    turn, _ = torch.linalg.qr(torch.randn(4, 4))
    found = similarity(torch.stack([x, 3 * x @ turn + 1, torch.randn(50, 4)]))
    assert found[0, 1] == pytest.approx(1, abs=1e-5)
    assert found[0, 2] < 0.5
    torch.testing.assert_close(found, found.T)


def test_an_older_config_without_initial_f_has_the_plain_one(tmp_path):
    cfg = compose(["attn=aft", "experiment=novel", "starts=none"])
    assert compose(["attn=aft", "experiment=novel"]).attn.position_weight.initial_f == "decays"
    del cfg.attn.position_weight.initial_f
    record = Record(tmp_path)
    record.start(cfg)
    assert config_of(record).attn.position_weight.initial_f == "ones"


def test_the_folder_of_a_start_s_run(tmp_path):
    cfg = compose(["study=starts", f"results={tmp_path}"], "reproduce")
    record = checked_record(tmp_path / "runs", starts_page.words(cfg, "mha_plus", "random head mix"), 100)
    assert finished(record) is None
    assert record.folder == tmp_path / "runs/novel/mha_plus-initial_head_mix=uniform-stop=200-seed100"
    assert isinstance(record, Record)


@pytest.mark.parametrize("variant", ["gau", "flash_mixed_chunk"])
def test_the_random_scales_of_gated_units_are_those_of_the_paper(variant):
    words = [f"attn={variant}", *TINY, "attn.key_size=512"]
    random, ones = (build_model(compose([*words, f"attn.initial_scale={each}"]), 40) for each in ("normal", "ones"))
    views, plain = (model.blocks[0].attn.views for model in (random, ones))
    assert torch.equal(plain.scale, torch.ones_like(plain.scale))
    assert views.scale.std().item() == pytest.approx(0.02, rel=0.15)
    assert views.scale.mean().item() == pytest.approx(0, abs=0.005)
    assert not views.offset.any()
    assert not plain.offset.any()

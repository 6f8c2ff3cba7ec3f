"""Samplers: each rule against plain Python; text that trained models write; the page of samplers."""

import json
import math
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from configs.cli import compose
from data.files import UserError
from data.reading import read_json
from models.sampling import Sampler, generate, ids_of
from scripts import reproduce, sample
from scripts.reporting import samples as samples_page
from scripts.studies import samplers
from tests.conftest import ROOT, TINY, command
from train import train
from training.loading import load_run
from training.record import Record

pytestmark = pytest.mark.slow

RULES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.0},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"top_p": 0.3, "top_p_x": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_a": 0.02},
    {"top_a": 0.2, "top_a_power": 0.5},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "top_a": 0.1, "repetition_penalty": 1.2},
]


def by_hand(sampler: Sampler, logits: list[float], seen: list[bool]) -> list[float]:
    """Apply the rules in the docstring of `Sampler` to the logits of one position, with loops over the vocabulary."""
    penalty = sampler.repetition_penalty
    logits = [(x / penalty if x > 0 else x * penalty) if s else x for x, s in zip(logits, seen, strict=True)]
    best = max(range(len(logits)), key=logits.__getitem__)
    if sampler.temperature == 0:
        return [float(i == best) for i in range(len(logits))]
    weights = [math.exp((x - logits[best]) / sampler.temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    keep = set(order)
    if sampler.top_k is not None:
        keep &= set(order[: sampler.top_k])
    if sampler.top_p is not None:
        count = next((n for n in range(len(p) + 1) if sum(p[i] for i in order[:n]) >= sampler.top_p), len(p))
        nucleus = set(order[:count])
        keep &= nucleus | {i for i in order if sampler.top_p_x is not None and p[i] >= sampler.top_p_x}
    if sampler.min_p is not None:
        keep &= {i for i in order if p[i] >= sampler.min_p * p[best]}
    if sampler.top_a is not None:
        keep &= {i for i in order if p[i] >= sampler.top_a * p[best] ** sampler.top_a_power}
    keep |= {best}
    return [p[i] / sum(p[j] for j in keep) if i in keep else 0.0 for i in range(len(p))]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("scale", [0.5, 3.0, 40.0])
def test_a_sampler_equals_its_rules_in_plain_python(rule, scale):
    torch.manual_seed(0)
    logits, seen = scale * torch.randn(6, 50), torch.rand(6, 50) < 0.3
    sampler = Sampler(**rule)
    found = sampler.probabilities(logits, seen)
    wanted = [by_hand(sampler, row, marks) for row, marks in zip(logits.double().tolist(), seen.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_extreme_logits_give_probabilities(rule):
    logits = torch.tensor([[1e30, -1e30, 0.0, 1e30], [-torch.inf, 5.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    p = Sampler(**rule).probabilities(logits, torch.zeros(3, 4, dtype=torch.bool))
    torch.testing.assert_close(p.sum(-1), torch.ones(3, dtype=torch.float64))
    assert (p >= 0).all()
    assert p[1, 1] == 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and 0 or more: got -1.0"),
        ({"temperature": math.nan}, "temperature must be finite and 0 or more"),
        ({"top_k": 0}, "top_k must be 1 or more: got 0"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1: got 1.5"),
        ({"top_p_x": 0.1}, "top_p_x needs top_p: give both"),
        ({"top_a_power": 0.0}, "top_a_power must be finite and above 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**rule)


class Counter:
    """A model of 10 symbols that predicts i + 1 after the symbol i, and 0 after 9.

    `starts` has a list for each call of `begin`, to which `step` adds the ids of the batch's first text.
    """

    def __init__(self, max_length):
        self.max_length, self.head, self.starts = max_length, torch.nn.Linear(1, 10), []

    def begin(self, batch):
        self.starts.append([])
        return self.starts[-1]

    def step(self, ids, state):
        assert self.max_length is None or len(state) < self.max_length
        state.append(ids[0].item())
        return 50 * torch.nn.functional.one_hot((ids + 1) % 10, 10).float()


@pytest.mark.parametrize("max_length", [None, 8])
def test_a_full_context_starts_again_from_its_last_half(max_length):
    model, nothing = Counter(max_length), torch.tensor([], dtype=torch.long)
    prompt = torch.tensor([[0, 1, 2], [5, 6, 7]])
    drawn = torch.stack(list(generate(model, prompt, 17, Sampler(), 0, 8, nothing)), 1)
    assert drawn.tolist() == [[(3 + i) % 10 for i in range(17)], [(8 + i) % 10 for i in range(17)]]
    assert model.starts[:2] == [[0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9, 0, 1, 2]]
    assert all(len(start) <= 8 for start in model.starts)


def test_a_long_prompt_is_cut_and_a_banned_symbol_is_never_drawn():
    model = Counter(8)
    prompt = torch.arange(13)[None] % 10
    drawn = torch.cat(list(generate(model, prompt, 5, Sampler(top_k=1), 0, 100, torch.tensor([5]))))
    assert model.starts[0][0] == 5
    assert len(model.starts[0]) == 8
    assert 5 not in drawn.tolist()


def test_the_seed_determines_the_text():
    class Even(Counter):
        def step(self, ids, state):
            return torch.zeros(len(ids), 10)

    def drawn(seed):
        torch.rand(seed + 1)  # other random numbers do not matter
        nothing = torch.tensor([], dtype=torch.long)
        return torch.stack(list(generate(Even(None), torch.tensor([[0]]), 40, Sampler(), seed, 8, nothing))).tolist()

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Return the folder of a trained tiny AFT. At each evaluation, it wrote a sample of 3 characters after a prompt."""
    folder = tmp_path_factory.mktemp("sampling")
    places = [f"runs={folder}/runs", f"data.cache={folder}/cache", "wandb.mode=disabled"]
    cfg = compose([*TINY, "data=file", f"data.path={text}", "data.vocab_size=100", "attn=aft", *places])
    train(cfg)
    return folder / "runs" / cfg.job.experiment / cfg.job.name


def test_a_loaded_run_writes_text(trained):
    run = load_run(str(trained))
    prompt = run.vocabulary[0]
    assert run.write(prompt, 5).startswith(prompt)
    assert run.write(prompt, 5) == run.write(prompt, 5)
    assert len(run.write(prompt, 5)) == 6
    with pytest.raises(UserError, match="the model does not know"):
        run.write("\u2603", 5)


def test_every_evaluation_writes_a_sample(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [len(row["sample"]) for row in rows if "fit_loss" in row] == [16 + 3, 16 + 3]
    assert all("sample" not in row for row in rows if "fit_loss" not in row)


def test_scripts_sample_prints_the_same_texts_again(trained):
    arguments = [f"run={trained}", "prompt=一丁", "length=30", "samples=2", "device=cpu"]
    first, again = (command("-m", "scripts.sample", *arguments) for _ in range(2))
    assert first.returncode == 0
    one, two = first.stdout.rstrip("\n").split("\n\n--- sample 2\n")
    assert len(one) == len(two) == 32
    assert one.startswith("一丁")
    assert one != two
    assert first.stdout == again.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["prompt=一a鿐b"], "the model does not know a 鿐 b: leave them out, or give replace=CHARACTER"),
        (["prompt=a\u200b b"], "the model does not know a U+200B U+0020 b: leave"),
        (["prompt=一\tx\r"], "the model does not know U+0009 x U+000D: leave"),
        (["prompt=a", "replace=x"], "replace must be one character that the model knows: got x"),
        (["prompt=''"], "prompt is empty"),
        (["length=0"], "length must be 1 or more: got 0"),
        (["prompt=一", "seed=-1"], "seed must be 0 or more: got -1"),
        (["prompt=一", f"seed={2**63}"], f"seed must be below 2^63: got {2**63}"),
        (["prompt=一", "top_p=2.0"], "top_p must be from 0 to 1: got 2.0"),
        (["prompt=一", "top_k=0"], "top_k must be 1 or more: got 0"),
        (["prompt=一", "context=17"], "context must be at most 16"),
        (["prompt=一", "temperature=hot"], "temperature must be a number, like 1.0: got hot"),
    ],
)
def test_bad_input_is_one_line(trained, given, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample", f"run={trained}", "device=cpu", *given])
    with pytest.raises(SystemExit) as ended:
        sample.run()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "prompt", ["1998", "true", "null a", "a,b", "[a]", "{a:b}", " a ", "却说\n", "it's", "a\\b\\", "${seed}", "x\\${x"]
)
def test_a_prompt_is_not_parsed_but_quotes_around_all_of_it_are_removed(prompt):
    assert compose(["run=x", f"prompt={prompt}"], "sample").prompt == prompt
    assert compose(["run=x", f"prompt='{prompt[0]}'"], "sample").prompt == prompt[0]


def test_a_prompt_of_several_quoted_parts_keeps_its_quotes():
    assert compose(["run=x", "prompt='a','b'"], "sample").prompt == "'a','b'"


def test_a_home_folder_may_follow_a_comma_and_a_space(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    assert compose(["data=file", "data.path=[~/a, ~/b]"]).data.path == ["/home/x/a", "/home/x/b"]


def test_a_closed_pipe_ends_scripts_sample_silently(trained):
    line = [sys.executable, "-m", "scripts.sample", f"run={trained}", "prompt=一", "length=5000", "device=cpu"]
    writer = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout.read(3) == "一".encode()
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait() == -signal.SIGPIPE


def test_replace_takes_the_place_of_unknown_characters(trained):
    vocabulary = read_json(trained / "vocabulary.json")
    known = vocabulary[0]
    assert ids_of(f"x{known}", vocabulary, known) == [0, 0]


def test_the_page_of_samplers_is_what_the_record_gives(trained, tmp_path):
    prompt = read_json(trained / "vocabulary.json")[0]
    arguments = [f"run={trained}", f"prompt={prompt}", f"results={tmp_path}", "length=8", "samples=2", "device=cpu"]
    assert command("-m", "scripts.reproduce", "study=samplers", *arguments).returncode == 0
    record, page = read_json(tmp_path / "samples.json"), (tmp_path / "samples.md").read_text()
    assert page == samples_page.page(record)
    assert len(record["samplers"]) > 5
    for name, found in record["samplers"].items():
        assert f"| {name}" in page
        assert [len(made) for made in found["texts"]] == [8, 8]


def test_study_samplers_refuses_a_run_that_is_not_finished(trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cut"
    shutil.copytree(trained, folder)
    summary = read_json(folder / "summary.json")
    (folder / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": summary["steps"]}))
    prompt = read_json(folder / "vocabulary.json")[0]
    arguments = [f"run={folder}", f"prompt={prompt}", f"results={tmp_path}/made"]
    monkeypatch.setattr("sys.argv", ["reproduce", "study=samplers", *arguments])
    with pytest.raises(SystemExit, match="2"):
        reproduce.run()
    assert capsys.readouterr().err == f"error: {folder} is not finished: give the folder of a finished run\n"


def test_the_losses_of_a_text_are_those_of_the_model(trained):
    model = load_run(trained).model
    text = torch.arange(20) % 7
    losses = [samplers.loss_of(model, text.tolist()[:n], n - 1, 16) for n in range(5, 17)]
    whole = model(text[None, :16])[0].double().log_softmax(-1)
    assert losses == pytest.approx([-whole[n - 2, text[n - 1]].item() for n in range(5, 17)], rel=1e-4)


def test_repeated_sequences_are_counted():
    assert samples_page.repeated("abcdefgh") == 0
    assert samples_page.repeated("abcdabcd") == pytest.approx(1 / 5)
    assert samples_page.repeated("aaaaaaaa") == pytest.approx(4 / 5)


def test_a_run_that_is_not_finished_is_sampled_from_its_state(trained, tmp_path):
    folder = tmp_path / trained.parent.name / trained.name
    shutil.copytree(trained, folder)
    weights = load_run(trained)[1].state_dict()
    (folder / "model.safetensors").unlink()
    rows = (folder / "metrics.jsonl").read_bytes()
    Record(folder).save_state({"step": 3, "model": weights, "optimizer": {}})
    (folder / "metrics.jsonl").write_bytes(rows + b"{}\n")  # as if the run continued meanwhile
    arguments = ["prompt=一丁", "length=9", "device=cpu"]
    cut, whole = (command("-m", "scripts.sample", f"run={run}", *arguments).stdout for run in (folder, trained))
    assert cut == f"{folder} is not finished: taking its state after step 3\n{whole}"
    assert (folder / "metrics.jsonl").read_bytes() == rows + b"{}\n"


@pytest.mark.parametrize(("texts", "threads"), [(1, 1), (2, 3)])
def test_a_single_text_is_drawn_with_one_thread(texts, threads):
    """The caller's number of threads is restored after each character, even if the text is not drawn to its end."""
    used = []

    class CountsThreads(Counter):
        def step(self, ids, state):
            used.append(torch.get_num_threads())
            return super().step(ids, state)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        prompt, nothing = torch.zeros(texts, 2, dtype=torch.long), torch.tensor([], dtype=torch.long)
        drawn = generate(CountsThreads(None), prompt, 5, Sampler(), 0, 4, nothing)
        for _ in range(4):
            next(drawn)
            assert torch.get_num_threads() == 3
        assert set(used) == {threads}
    finally:
        torch.set_num_threads(before)

"""Test command lines: bad input, which ends in one line and exit status 2; --help; names of runs; recorded commands."""

import shlex
import shutil
import sys
from types import SimpleNamespace

import hydra
import pytest
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

import evaluate
import models.build
import train
from configs import folder
from configs import help as config_help
from configs.arguments import command_line, quoted
from configs.checking import check_attention, check_values
from configs.cli import compose
from configs.folder import composed_by_hydra
from configs.help import comments_of, inheritance, key_meanings
from configs.schema import types_of
from data.files import UserError
from scripts import compare, list_runs, reproduce
from tests.conftest import ROOT, VARIANTS, command

COMMANDS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "no_output")

BAD = [
    (["attn=aftt"], "there is no attn=aftt, did you mean aft?; there are aft"),
    (["+seed=1"], "seed exists already: give seed=... without +"),
    (["+attn=gmlp"], "attn exists already: give attn=... without +"),
    (["ffn=attention", "ffn.hidden=9"], "there is no key ffn.hidden with this ffn; it exists with ffn=bilinear or "),
    (["rates.lr=0.002"], "there is no key rates.lr, did you mean optim.lr?"),
    (["experiment.steps=5"], "there is no key experiment.steps, did you mean train.steps?"),
    (
        ["attn=aft", "attn/position_weight=head_decay"],
        "there is no attn/position_weight with this attn; it exists with attn=rwv",
    ),
    (
        ["attn=rwv", "attn/position_weight=head_decay", "attn.position_weight.initial_f=ones"],
        "there is no key attn.position_weight.initial_f with this attn; it exists with attn=aft or attn=gmlp or",
    ),
    (["attn=aft", "attn.position_weight=null"], "attn.position_weight holds several keys: give attn.position_weight."),
    (["starts=foo"], "there is no starts=foo: give a file in configs/starts, or starts=none"),
    (["rates=small/foo"], "there is no rates=small/foo: give a file in configs/rates, or rates=none"),
    (["attn=[1,2]"], "attn must be one of the files in configs/attn: got [1,2]"),
    (["attn=a\nb"], "there is no attn=a b"),
    (["data=sango"], "there is no data=sango, did you mean sanguo?"),
    (["experiment=smal"], "there is no experiment=smal, did you mean small?"),
    (["attn.gama=true"], "there is no key attn.gama, did you mean attn.gamma?"),
    (["attn=mha_plus", "attn.rotery=1"], "there is no key attn.rotery, did you mean attn.rotary?"),
    (["trian.steps=1"], "there is no key trian.steps, did you mean train.steps?"),
    (["+attn.foo=1"], "there is no key attn.foo"),
    (["~attn.gamma"], "attn.gamma is needed and cannot be deleted"),
    (["~seed=7"], "seed is needed and cannot be deleted"),
    (["~attn=gau"], "attn is needed and cannot be deleted"),
    (["~train.stop"], "train.stop is needed and cannot be deleted"),
    (["train.steps=many"], "train.steps must be a whole number, like 1500: got many"),
    (["train.steps=1.5"], "train.steps must be a whole number, like 1500: got 1.5"),
    (["attn.gamma=1"], "attn.gamma must be true or false, like true: got 1"),
    (["train=3"], "train holds several keys: give train.steps=..."),
    (["attn=null"], "attn must be one of the files in configs/attn: got null"),
    (["starts="], "starts must be one of the files in configs/starts: got nothing"),
    (["data=hub", "data.name=null"], "data.name must be a word: got null"),
    (["data=file", "data.path=x", "data.source.path=null"], "data.source.path must be"),
    (["attn=aft,mha"], "attn=aft,mha gives several values: -m attn=aft,mha makes a run of each"),
    (["train.steps"], "arguments are key=value: got train.steps; give train.steps=..."),
    (["aft"], "arguments are key=value: got aft; --help lists the keys"),
    (["atn=aft"], "there is no key atn, did you mean attn?"),
    (["experimnt=small"], "there is no key experimnt, did you mean experiment?"),
    (
        ["attn=rwv", "attn/position_weight=toeplits"],
        "there is no attn/position_weight=toeplits, did you mean toeplitz?; there are",
    ),
    (["attn=MHA"], "there is no attn=MHA, did you mean mha?; there are aft"),
    (["attn=position_weight/toeplitz"], "there is no attn=position_weight/toeplitz: --help lists what there is"),
    (
        ["attn=mha", "attn.position_weight.per_head=false"],
        "there is no key attn.position_weight.per_head with this attn; it exists with attn=aft or attn=gmlp or ",
    ),
    (
        ["data=sanguo", "data.path=x"],
        "there is no key data.path with this data; it exists with data=file or data=jinyong",
    ),
    (
        ["data=/a/path"],
        "there is no data=/a/path; there are file, hub, induction, jinyong, recall, sanguo, zh_mixed; ",
    ),
    (["model.width=9"], "there is no key model.width; model has layers, heads, dim, context, norm"),
    (["dropout=0.1"], "there is no key dropout, did you mean model.dropout?"),
    (["zzz=0.1"], "there is no key zzz; --help lists the keys"),
    (["model.dropout=1"], "model.dropout must be from 0 to below 1: got 1"),
    (["train.patience=0"], "train.patience must be 1 or more: got 0"),
    (["train.patience=x"], "train.patience must be a whole number or null: got x"),
    (["train.init_from=nowhere"], "train.init_from=nowhere holds no finished run: give a folder that train.py printed"),
    (["train.init_from=3"], "train.init_from must be a word or null: got 3"),
    (["data=file"], "data.path is missing: give data.path=..."),
    (["data=file", "data.path=金庸 (全集)=1.txt"], "data.path=金庸 (全集)=1.txt: no such file"),
    (["train.steps=-1"], "train.steps must be 0 or more: got -1"),
    (["train.stop=5000"], "train.stop must be 1 to train.steps=1500, or null: got 5000"),
    (["train.stop=0"], "train.stop must be 1 to train.steps=1500, or null: got 0"),
    (["train.stop=x"], "train.stop must be a whole number or null: got x"),
    (["train.batch=0"], "train.batch must be 1 or more: got 0"),
    (["optim.lr=0.0"], "optim.lr must be above 0: got 0.0"),
    (["train.device=tpu"], "train.device must be auto, cpu or cuda: got tpu"),
    (["train.device=cuda:99"], "train.device=cuda:99: this machine has"),
    (["train.precision=fp8"], "train.precision must be auto, float32 or bf16: got fp8"),
    (["train.compile=fast"], "train.compile must be true or false or null: got fast"),
    (["data.vocab_size=abc"], "data.vocab_size must be a whole number or null, like 2048: got abc"),
    (["attn=mha", "attn.key_size=2.5"], "attn.key_size must be a whole number or null: got 2.5"),
    (["attn=mha", "attn.position_weight=foo"], "attn.position_weight must be null: got foo"),
    (["attn.dim=abc"], "attn.dim must be a whole number, like 128: got abc"),
    (["train.steps=inf"], "train.steps must be a whole number, like 1500: got inf"),
    (["train.steps=nan"], "train.steps must be a whole number, like 1500: got nan"),
    (["train.batch=8.5"], "train.batch must be a whole number, like 8: got 8.5"),
    (["seed=99999999999999999999999"], "seed must be below 2^63"),
    (["optim.betas=[0.9]"], "optim.betas must be two numbers from 0 to below 1: got [0.9]"),
    (["optim.betas=[a,b]"], "optim.betas must be two numbers from 0 to below 1: got ['a', 'b']"),
    (["optim.betas=[0.9,2]"], "optim.betas must be two numbers"),
    (["optim.eps=-1"], "optim.eps must be above 0: got -1"),
    (["optim.weight_decay=-1"], "optim.weight_decay must be 0 or more: got -1"),
    (["optim.min_lr=-1"], "optim.min_lr must be 0 or more: got -1"),
    (["train.checkpoint_seconds=nan"], "train.checkpoint_seconds must be 0 or more: got nan"),
    (["data.encoding=foo"], "data.encoding must be an encoding that Python knows, such as gb18030: got foo"),
    (["data.encoding=5"], "data.encoding must be a word or null: got 5"),
    (["data=file", "data.path=5"], "data.path must be a word or a list of words: got 5"),
    (["data=hub", "data.name=./nowhere"], "data.name=./nowhere: there is no such folder"),
    (["optim.impl=mine"], "optim.impl must be fused, package, adamw or muon: got mine"),
    (["optim=adamw", "optim.rectify=true"], "optim.rectify=true needs AdaBelief"),
    (["optim=muon", "optim.rectify=true"], "optim.rectify=true needs AdaBelief: optim.impl=muon does not have it"),
    (["train.parallel=zero"], "train.parallel must be ddp or fsdp: got zero"),
    (["wandb.mode=of"], "wandb.mode must be online, offline or disabled: got of"),
    (["evaluation.stride=500"], "evaluation.stride must be at most model.context=16: got 500"),
]
BAD_MODEL = [
    (["attn.dim=12"], "attn.dim must be model.dim=24: got 12"),
    (["ffn.dim=12"], "ffn.dim must be model.dim=24: got 12"),
    (["attn=alibi", "model.heads=1", "attn.heads=3"], "attn.position_weight.heads must be attn.heads=3: got 1"),
    (
        ["attn=mha_tw", "attn.position_weight.context=8"],
        "this attn is defined for 8 positions, fewer than model.context=16: take model.context=8",
    ),
    (["model.heads=5"], "heads must divide the width: 5 heads, width 24"),
    (["model.layers=0"], "model.layers must be 1 or more: got 0"),
    (
        ["model.context=30000"],
        "needs more than 30000 characters to train on: without the held-out part, the text has 19000",
    ),
    (["model.context=1500"], "needs more than 1500 held-out characters, there are 1000"),
    (["attn.impl=cuda"], "impl must be one of reference, torch, triton: got cuda"),
    (
        ["attn=mha_plus", "attn.talking_heads=loud"],
        "talking_heads must be one of none, logits, weights, both: got loud",
    ),
    (["attn=mha_plus", "attn.rotary=1.5"], "rotary is a fraction of the dimensions, from 0 to 1: got 1.5"),
    (
        ["model.dim=9", "attn=mha", "attn.rotary=1.0"],
        "rotary must select an even number of dimensions: 1.0 times 3 selects 3; change rotary, or the size of the "
        "heads of Q and K",
    ),
    (["ffn.hidden=0"], "ffn.hidden must be 1 or more: got 0"),
    (["attn=mha", "attn.key_size=0"], "attn.key_size must be 1 or more: got 0"),
    (["attn=gau", "attn.key_size=0"], "attn.key_size must be 1 or more: got 0"),
    (["attn=gmlp", "attn.expansion=-1"], "attn.expansion must be 1 or more: got -1"),
    (["attn=aft_full", "attn.position_weight.rank=0"], "attn.position_weight.rank must be 1 or more: got 0"),
    (["model.dim=10000000000", "model.heads=1"], "model.dim must be below 2^31: got 10000000000"),
    (["model.dim=1000000000", "model.heads=1"], "model.dim=1000000000 and the other sizes need more memory"),
    (["model.norm=rezero", "model.output_scale=0"], "model.norm=rezero needs model.output_scale above 0"),
    (["model.norm=sandwich"], "model.norm must be pre, post or rezero: got sandwich"),
    (["attn=gau", "attn.scale=log_n"], "scale=log_n needs kernel=softmax"),
    (["attn=gau", "attn.divisor=whole"], "divisor must be one of visible, context: got whole"),
    (["attn=rwv", "attn.W=exp_k", "attn.denominator=none"], "W=exp_k can overflow without a denominator"),
    (
        ["attn=rwv", "attn.W=relu2_qk"],
        "W=relu2_qk is not always positive, so that its sum can be 0: take denominator=none",
    ),
    (["attn=talking_heads", "attn.talking_heads=weights", "attn.logit_heads=6"], "needs talking_heads=logits or both"),
    (["attn=aft_local", "attn.position_weight.window=0"], "attn.position_weight.window must be 1 or more: got 0"),
    (
        ["attn=aft", "attn.position_weight.extrapolation=constant"],
        "position_weight.extrapolation=constant needs position_weight.alpha_beta=false",
    ),
    (["attn=flash_mixed_chunk", "attn.chunk_size=0"], "attn.chunk_size must be 1 or more: got 0"),
    (["attn=realformer", "attn.residual_attention=all"], "residual_attention must be one of none, scores, qk: got all"),
    (
        ["attn._target_=attn.nix.Nix"],
        "attn._target_=attn.nix.Nix is refused: no file in configs/attn or configs/ffn names it",
    ),
    (["train.patience=2", "data.holdout=0"], "train.patience needs held-out text to evaluate: give a larger data.ho"),
    (["model.init_std=-1"], "model.init_std must be 0 or more: got -1"),
    (["model.output_scale=-1"], "model.output_scale must be 0 or more: got -1"),
    (["attn=mha_plus", "attn.initial_head_mix=x"], "initial_head_mix must be one of identity, uniform: got x"),
    (["attn=gau", "attn.initial_scale=x"], "initial_scale must be one of ones, normal: got x"),
    (["attn=mha_plus", "attn.denominator=none"], "denominator must be one of with_w, without_w: got none"),
    (
        ["attn=mha", "attn.denominator=without_w"],
        "denominator=without_w needs a w: with position_weight=null take denominator=with_w",
    ),
    (["attn=gmlp", "attn.gamma=false", "attn.gamma_scales_bias=true"], "gamma_scales_bias=true needs gamma=true"),
    (["attn.position_weight.initial_f=x"], "position_weight.initial_f must be one of ones, halves, decays: got x"),
]


def run_in_process(arguments, monkeypatch, capsys):
    """Run train.py with these arguments in this process, and return its exit status and its stderr."""
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        train.run()
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys, text):
    given = {a.split("=")[0] for a in arguments}
    rest = ["model.context=16", "evaluation.stride=8", f"runs={tmp_path}/runs", f"data.cache={tmp_path}/cache"]
    if "data" not in given:
        rest += ["data=file", f"data.path={text}"]
    usual = [a for a in rest if a.split("=")[0] not in given]
    status, error = run_in_process([*usual, *arguments], monkeypatch, capsys)
    assert status == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), BAD_MODEL, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_bad_models(arguments, message, tiny, tmp_path, monkeypatch, capsys):
    given = {a.split("=")[0] for a in arguments}
    rest = [a for a in tiny if a.split("=")[0] not in given]
    status, error = run_in_process([*rest, *arguments], monkeypatch, capsys)
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (evaluate, ["{}"], "arguments are key=value: got {}; give run={}"),
        (compare, ["rows=aft,mha"], "rows is a list: give rows=[aft,mha]"),
        (reproduce, ["claims=headline,speed"], "claims is a list: give claims=[headline,speed]"),
        (reproduce, ["study=rates", "setups=small"], "there is no key setups, did you mean setup?"),
    ],
)
def test_bad_arguments_of_other_commands(main, arguments, message, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "aft-lr=0.002-seed0"
    folder.mkdir()
    monkeypatch.setattr("sys.argv", ["command", *(argument.format(folder) for argument in arguments)])
    with pytest.raises(SystemExit, match="2"):
        main.run()
    assert capsys.readouterr().err == f"error: {message.format(folder, folder)}\n"


def test_a_single_value_is_accepted_for_a_list():
    assert compose(["rows=aft", "seeds=3"], "compare") == compose(["rows=[aft]", "seeds=[3]"], "compare")
    assert compose(["claims=headline"], "reproduce").claims == ["headline"]
    rows = compose(["rows=[aft train.steps=4, gmlp optim.lr=0.003]"], "compare").rows
    assert rows == ["aft train.steps=4", "gmlp optim.lr=0.003"]
    with pytest.raises(UserError, match=r"seeds must be a list of whole numbers, like \[0\]: got \['a'\]"):
        compose(["seeds=a"], "compare")


@pytest.mark.parametrize(
    ("config", "argument", "message"),
    [
        ("config", "attn.gamma=null", "attn.gamma must be true or false, like true: got null"),
        ("config", "optim.lr=inf", "optim.lr must be finite: got inf"),
        ("config", "attn.key_scale=nan", "attn.key_scale must be a finite number: got nan"),
        ("config", "data.holdout=1", "data.holdout must be from 0 to below 1: got 1"),
        ("benchmark", "tier=full", "tier must be cpu, gpu or null: got full"),
        ("benchmark", "precisions=fp8", r"precisions must be a list of float32 or bf16 or null: got \['fp8'\]"),
        ("benchmark measure=decode", "variants=null", "variants must be a list of words, like .*: got null"),
        ("reproduce study=rates variants=aft", "learning_rates=0", r"learning_rates must be above 0: got \[0\]"),
        ("compare", "seeds=[]", "seeds must not be empty"),
        ("compare", "seeds=[0,-1]", r"seeds must be 0 or more: got \[0, -1\]"),
        ("benchmark measure=rows", "repeats=0", "repeats must be 1 or more: got 0"),
        ("benchmark measure=rows", "vocab_size=0", "vocab_size must be 1 or more: got 0"),
        ("benchmark", "layers.lengths=[128,0]", "layers.lengths must be 1 or more"),
        ("benchmark measure=memory", "sizes=[[1,2]]", r"sizes must be a list, like .*: got \[\[1, 2\]\]"),
        ("benchmark", "budget=nan", "budget must be 0 or more: got nan"),
        ("reproduce", "claims=[]", "claims must not be empty"),
        ("reproduce", "processes=0", "processes must be 1 or more: got 0"),
        ("reproduce study=precision", "scales=[0.5,0]", r"scales must be above 0: got \[0.5, 0\]"),
        ("search", "rungs=[0]", r"rungs must be 1 or more: got \[0\]"),
    ],
)
def test_values_out_of_range_or_of_a_wrong_type_are_refused(config, argument, message):
    command, *chosen = config.split()
    with pytest.raises(UserError, match=message):
        compose([*chosen, argument], command)


def test_exactly_these_keys_may_be_null():
    cfg, taken = compose(["attn=mha"]), set()
    usual, _ = folder.with_choices("config", ("attn=mha",))
    for key in folder.flat(usual):
        changed = cfg.copy()
        OmegaConf.update(changed, key, None)
        try:
            check_values(changed, usual, "config")
            taken.add(key)
        except UserError:
            continue
    constructors = {"attn.position_weight", "attn.key_size", "attn.logit_heads", "attn.value_heads", "ffn.hidden"}
    others = {"data.vocab_size", "data.processes", "optim.clip", "train.compile"}
    others |= {f"train.{key}" for key in ("stop", "patience", "init_from")}
    assert taken == constructors | others


def test_null_is_accepted_for_keys_whose_comment_promises_it():
    assert compose(["run=x", "top_a=null"], "sample").top_a is None
    assert compose(["runs=null"], "compare").runs is None
    assert compose(["experiment=small", "data.vocab_size=null"]).data.vocab_size is None


def test_whole_numbers_may_be_written_as_powers_of_ten():
    assert repr(compose(["train.steps=1e3"]).train.steps) == "1000"
    assert repr(compose(["seeds=[1e1,2]"], "compare").seeds) == "[10, 2]"
    assert repr(compose(["seeds=[0.0]"], "compare").seeds) == "[0]"
    with pytest.raises(UserError, match=r"seeds must be a list of whole numbers, like \[0\]: got \[False\]"):
        compose(["seeds=[false]"], "compare")
    assert repr(compose(["attn=mha", "attn.key_size=4.0"]).attn.key_size) == "4"


def test_types_come_from_the_constructor():
    """key_size may be null in MHA, but not in GAU, whose constructor declares it as Size."""
    assert compose(["attn=mha", "attn.key_size=null"]).attn.key_size is None
    with pytest.raises(UserError, match=r"attn\.key_size must be a whole number, like 128: got null"):
        compose(["attn=gau", "attn.key_size=null"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["attn=mha", "model.dim=64", "train.steps=1e4", "optim.lr=0.002", "data.path='a b.txt'"],
        ["experiment=small", "attn=rwv", "attn.R=gelu", "attn/position_weight=head_decay", "seed=3"],
        ["attn.position_weight=null", "model.dim=${model.context}", "train.init_from=null"],
        ["model={dim: 32}", "+x=3"],
        ["model.dmi=3"],
        ["attn=nope"],
        ["seed=1,2"],
        ["seed"],
        ["model=3"],
        ["hydra.run.dir=x"],
    ],
)
def test_composed_configs_equal_those_of_hydra(overrides):
    """`folder.composed` and Hydra give the same config and chosen files, or the same error."""
    found = []
    for compose_with in (folder.composed, folder.composed_by_hydra):
        try:
            cfg, choices = compose_with("config", overrides)
            found.append((OmegaConf.to_yaml(cfg), dict(choices)))
        except Exception as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]


@pytest.mark.parametrize("choice", [f"attn={v}" for v in VARIANTS] + ["ffn=geglu", "ffn=relu", "ffn=channel_mix"])
def test_no_constructor_declares_a_plain_int(choice):
    cfg, _ = folder.composed("config", [choice])
    for key in folder.flat(OmegaConf.masked_copy(cfg, ["attn", "ffn"])):
        assert int not in types_of("config", key, cfg), f"{key}: declare Size, or another range of attn/ranges.py"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_target_": None}, "the yaml of attn needs the keys _target_, which names a class, and _partial_: true"),
        ({"_partial_": None}, "the yaml of attn needs the keys _target_, which names a class, and _partial_: true"),
        ({"tokenshift": True}, "the yaml of attn does not fit attn.aft.AFT: got an unexpected keyword argument"),
        ({"heads": None}, "the yaml of attn does not fit attn.aft.AFT: missing a required argument: 'heads'"),
    ],
)
def test_a_yaml_that_its_class_does_not_take_is_refused_in_one_line(tiny, changes, message):
    cfg = compose(tiny)
    OmegaConf.set_struct(cfg, False)
    for key, value in changes.items():
        if value is None:
            del cfg.attn[key]
        else:
            cfg.attn[key] = value
    with pytest.raises(UserError, match=message):
        models.build.build_model(cfg, 10)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("token_shift", "yes please", "be true or false: in configs/attn it is yes please"),
        ("heads", 0, "be 1 or more: in configs/attn it is 0"),
        ("heads", None, "be a whole number: in configs/attn it is null"),
        ("position_weight.per_head", 3, "be true or false: in configs/attn it is 3"),
    ],
)
def test_a_bad_value_in_the_yaml_of_an_attention_is_refused_in_one_line(key, value, wanted):
    usual = folder.with_choices("config", ("attn=aft",))[0].copy()
    check_attention(usual, "config")
    OmegaConf.update(usual, f"attn.{key}", value)
    with pytest.raises(UserError, match=rf"attn.{key} must {wanted}"):
        check_attention(usual, "config")


def test_an_error_in_a_user_s_attention_is_shown(tiny, tmp_path, monkeypatch):
    (tmp_path / "own_attention.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = compose(tiny)
    cfg.attn._target_ = "own_attention.Own"
    known = models.build.known_targets() | {"own_attention.Own"}
    monkeypatch.setattr(models.build, "known_targets", lambda: known)
    with pytest.raises(UserError, match=r"'own_attention.Own': ModuleNotFoundError: No module named 'no_such_module'"):
        models.build.build_model(cfg, 10)


def test_a_user_s_attention_may_take_0_and_negative_numbers(tiny, monkeypatch):
    cfg = compose(tiny)
    for key, value in (("sinks", 0), ("offset", -1)):
        OmegaConf.update(cfg, f"attn.{key}", value, force_add=True)
    monkeypatch.setattr(models.build, "check_call", lambda part, node: None)  # AFT does not take these keys
    built = SimpleNamespace(blocks=[])
    monkeypatch.setattr(models.build, "instantiate_model", lambda cfg, vocabulary: built)
    assert models.build.build_model(cfg, 10) is built


def test_a_kernel_is_refused_without_a_gpu(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = [*tiny, "attn.impl=triton", "train.device=cpu"]
    assert run_in_process(arguments, monkeypatch, capsys) == (
        2,
        "error: attn.impl=triton needs a GPU: take attn.impl=torch\n",
    )
    assert not (tmp_path / "runs").exists()


def test_a_command_outside_of_the_repository_names_missing_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("configs.cli.is_command", lambda: True)
    refused = ["train.stop=5000", f"wandb.dir={tmp_path}"]  # refused before anything is written
    start = f"this command was started in {tmp_path}, not in {ROOT}; here, these paths do not exist: "

    def output_in(folder):
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["train.py", *refused])
        with pytest.raises(SystemExit, match="2"):
            train.run()
        return capsys.readouterr().out

    assert output_in(ROOT) == ""
    assert output_in(tmp_path) == f"{start}runs=out/runs, data.cache=data/cache\n"
    (tmp_path / "out/runs").mkdir(parents=True)
    assert output_in(tmp_path) == f"{start}data.cache=data/cache\n"
    (tmp_path / "data/cache").mkdir(parents=True)
    assert output_in(tmp_path) == ""


@pytest.mark.slow
def test_a_mistake_has_no_traceback_in_the_shell():
    done = command("train.py", "attn=aftt")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def help_of(run, arguments, monkeypatch, capsys):
    """Return what a command prints with --help, with each stretch of white space replaced by one space."""
    monkeypatch.setattr("sys.argv", ["command", *arguments, "--help"])
    run()
    return " ".join(capsys.readouterr().out.split())


def test_help_names_what_can_be_chosen(monkeypatch, capsys):
    output = help_of(train.run, [], monkeypatch, capsys)
    assert "experiment=novel trains a model of the source's size" in output
    assert f"attn=aft the attention: {', '.join(VARIANTS)} " in output
    assert "large, novel, recall, search, small, source " in output  # the experiments
    assert " train.batch=8 sequences per step, each of model.context characters [1 or more] " in output
    assert " attn.gamma=true whether ATT has " in output
    assert " attn.position_weight.per_head=true whether each head has its own f " in output
    assert " attn.chunk_size=64 positions per chunk [1 or more] " in help_of(
        train.run, ["attn=flash_mixed_chunk"], monkeypatch, capsys
    )
    for attn in ("mha", "mha_tw", "aft"):  # mha_tw inherits the key from mha
        assert "is logged), triton" in help_of(train.run, [f"attn={attn}"], monkeypatch, capsys)
    of_a_sweep = help_of(
        train.run, ["-m", "attn=rwv,gmlp", "optim.lr=1e-3,2e-3"], monkeypatch, capsys
    )  # of its first values
    assert " attn/position_weight=toeplitz channel_decay, head_decay, toeplitz " in of_a_sweep


def test_help_names_no_group_that_a_command_lacks(monkeypatch, capsys):
    output = help_of(evaluate.run, [], monkeypatch, capsys)
    assert output.startswith("python evaluate.py run=FOLDER: measure the perplexity of a trained model")
    assert " and its speed Keys, KEY=VALUE: run=??? a run's folder context=null" in output
    assert "attn" not in output


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_gives_every_key_a_meaning(name):
    groups = {"config": ("attn", "data", "ffn", "optim", "model"), "reproduce": ("study",), "benchmark": ("measure",)}
    files = [
        f"{group}={path.stem}" for group in groups.get(name, ()) for path in (ROOT / "configs" / group).glob("*.yaml")
    ]
    for chosen in files or [None]:
        cfg, choices = folder.composed(name, [chosen] if chosen else [])
        rows = key_meanings(name, cfg, choices)
        assert [key for key, (_, meaning) in rows.items() if not meaning] == []
        shown = {key for key in folder.flat(cfg) if not key.endswith("_")} - {"ffn", "study", "measure"}
        assert all(any(key == row or key.startswith(f"{row}.") for row in rows) for key in shown)
        sections = [key for key, (value, _) in rows.items() if value == "{...}"]
        assert name != "config" or not sections


def test_help_gives_a_key_the_meaning_that_its_own_files_say():
    meaning = {}
    for overrides in ([], ["attn.heads=4", "attn.dim=64"], ["data=recall"], ["data=zh_mixed"]):
        cfg, choices = folder.composed("config", overrides)
        meaning[" ".join(overrides)] = {key: text for key, (_, text) in key_meanings("config", cfg, choices).items()}
    for key in ("attn.heads", "attn.dim"):  # their meanings are those of the model's keys
        own = meaning[""][key.replace("attn", "model")]
        assert meaning[""][key] == meaning["attn.heads=4 attn.dim=64"][key] == own
    assert meaning["data=recall"]["data.length"] == "number of characters of a row"
    assert meaning["data=zh_mixed"]["data.name"] == "name of the corpus in records"


def test_every_command_has_a_config_of_its_name_and_at_most_ten_are_scripts():
    scripts = [path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__"]
    assert len(scripts) <= 10
    assert {*scripts, "config", "evaluate"} == set(COMMANDS)


def test_a_command_ends_normally_if_its_output_cannot_be_written(monkeypatch):
    monkeypatch.setattr("sys.argv", ["list_runs", f"runs={ROOT}/results/runs", "match=novel/*"])
    with open("/dev/full", "w", encoding="utf-8") as full:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, full)
        list_runs.run()
        sys.stdout.flush()


# Names


def name_of(*overrides):
    return compose([*overrides, "rates=none", "starts=none"]).job.name


def test_a_run_is_named_by_its_differences():
    assert name_of() == name_of("attn=aft") == name_of("attn.gamma=true") == "aft-seed0"
    assert name_of("attn=gmlp", "seed=3", "experiment=novel") == "gmlp-seed3"
    assert name_of("attn.gamma=false", "optim.lr=3e-4") == "aft-gamma=false-lr=0.0003-seed0"
    assert name_of("data=zh_mixed", "data.vocab_size=5744") == "aft-zh_mixed-vocab_size=5744-seed0"
    assert name_of("model.dropout=0.1", "train.patience=5") == "aft-dropout=0.1-patience=5-seed0"
    assert name_of("train.init_from=out/runs/small/gau-seed1").startswith("aft-init_from=gau-seed1-")
    assert name_of("train.init_from=runs/gau-lr=0.002-seed1").startswith("aft-init_from=gau-lr_0.002-seed1-")
    assert name_of("train.steps=2e2") == name_of("train.steps=200") == "aft-steps=200-seed0"
    assert name_of("attn=gmlp_sgu", "model.heads=4") == "gmlp_sgu-heads=4-seed0"
    assert name_of("attn=gmlp_sgu", "attn.heads=4") == "gmlp_sgu-attn.heads=4-seed0"


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Return a function that takes {path: content} and writes these files into a copy of configs/.

    In the copy, starts/ and rates/ contain only these files and `none.yaml`.
    """
    shutil.copytree(folder.CONFIGS, tmp_path / "configs", ignore=shutil.ignore_patterns("starts", "rates"))
    monkeypatch.setattr(folder, "CONFIGS", tmp_path / "configs")
    folder.composed_once.cache_clear()  # it caches configs composed from the committed files

    def write(files: dict[str, str]) -> None:
        for path, content in ({"starts/none": "{}", "rates/none": "{}"} | files).items():
            file = tmp_path / f"configs/{path}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# @package _global_\n{content}\n")

    yield write
    folder.composed_once.cache_clear()


def test_a_chosen_rate_is_in_the_config_and_in_the_name(chosen):
    """A rate on the command line replaces the chosen one. If both are equal, the run is the same."""
    rates = {"small/adabelief/aft": 3e-3, "small/adabelief/gmlp": 1e-3, "novel/adabelief/aft": 5e-4}
    chosen({f"rates/{path}": f"optim: {{lr: {rate}}}" for path, rate in rates.items()})

    def rate_and_name(*overrides):
        cfg = compose([*overrides, "seed=1"])
        return cfg.optim.lr, cfg.job.name

    assert rate_and_name("attn=aft") == rate_and_name("attn=aft", "optim.lr=3e-3") == (3e-3, "aft-lr=0.003-seed1")
    assert rate_and_name("attn=aft", "attn.gamma=false") == (3e-3, "aft-gamma=false-lr=0.003-seed1")
    assert rate_and_name("attn=aft", "optim.lr=1e-3") == rate_and_name("attn=aft", "rates=none") == (1e-3, "aft-seed1")
    assert rate_and_name("attn=gmlp") == (1e-3, "gmlp-seed1")
    assert rate_and_name("attn=mha") == (1e-3, "mha-seed1")
    assert rate_and_name("attn=aft", "experiment=novel") == (5e-4, "aft-lr=0.0005-seed1")
    assert rate_and_name("attn=aft", "optim=muon") == (1e-3, "aft-muon-seed1")
    assert rate_and_name("attn=aft", "experiment=large") == (3e-4, "aft-seed1")


def test_a_chosen_start_is_in_the_config_and_in_the_name(chosen):
    """The run is the same if the command line gives the same start."""
    chosen({"starts/novel/aft": "attn: {position_weight: {initial_f: decays}}\nmodel: {init_std: 0.03}"})

    def start_and_name(*overrides):
        cfg = compose([*overrides, "seed=1"])
        return cfg.attn.position_weight.initial_f, cfg.model.init_std, cfg.job.name

    novel, same = "experiment=novel", ("attn.position_weight.initial_f=decays", "model.init_std=0.03")
    decays = ("decays", 0.03, "aft-initial_f=decays-init_std=0.03-seed1")
    assert (
        start_and_name(novel) == start_and_name(novel, *same) == start_and_name(novel, "starts=none", *same) == decays
    )
    assert start_and_name(novel, "starts=none") == start_and_name() == ("ones", 0.02, "aft-seed1")


def test_keys_that_do_not_change_the_result_are_not_in_the_name():
    keys = ["train.device=cpu", "wandb.mode=disabled", "resume=false", "runs=/tmp/x", "train.log_every=3"]
    assert name_of(*keys) == "aft-seed0"


def test_values_that_a_name_cannot_hold_are_distinguished_by_a_hash():
    names = [name_of("data=file", f"data.path={path}") for path in ("/a/金庸.txt", "/b/金庸.txt")]
    assert names[0] != names[1]
    assert all(name.startswith("aft-file-path=金庸-") and name.endswith("-seed0") for name in names)
    assert "/" not in "".join(names)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_config_passes_its_own_check(name):
    config = OmegaConf.load(ROOT / f"configs/{name}.yaml")
    del config.defaults  # they name files, not keys
    missing = OmegaConf.missing_keys(config)
    for key in missing:
        with pytest.raises(UserError, match=f"{key} is missing: give {key}=..."):
            compose([], name)
    compose([f"{key}={'[x]' if key == 'variants' else 'x'}" for key in missing], name)


@pytest.mark.parametrize(
    ("argument", "typed"),
    [
        ("attn=aft", "attn=aft"),
        ("data.path=金庸.txt", "'data.path=金庸.txt'"),
        ("data.path=[金.txt,b c.txt]", "'data.path=[金.txt,b c.txt]'"),
        ("data.path=it's.txt", '"data.path=it\'s.txt"'),
        ("data.path='5'", "\"data.path='5'\""),
        ("rows=[mha,'aft attn.gamma=false']", "\"rows=[mha,'aft attn.gamma=false']\""),
        ("prompt=你好 $5", "'prompt=你好 $5'"),
        ("--cfg", "--cfg"),
    ],
)
def test_a_recorded_command_can_be_typed_again(argument, typed):
    given = quoted(argument)
    line = command_line("python train.py", [given])
    assert line == f"python train.py {typed}"
    assert [quoted(word) for word in shlex.split(line)[2:]] == [given]


def test_a_run_records_the_command_that_was_typed():
    command = compose(["data=file", "data.path=/a b/金庸.txt"]).job.command
    assert command == "python train.py data=file 'data.path=/a b/金庸.txt'"


def test_a_program_that_uses_hydra_too_keeps_its_own_configs(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert composed_by_hydra("config", ["attn=aft"])[1]["attn"] == "aft"
        with pytest.raises(MissingConfigException):
            composed_by_hydra("config", ["attn=none_such"])
        assert hydra.compose("config") == {"mine": 1}


def test_a_tilde_is_the_home_folder_in_every_unquoted_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/p g")
    assert compose(["data=file", "data.path=[~/a.txt,~/b]"]).data.path == ["/home/p g/a.txt", "/home/p g/b"]
    assert compose(["runs=~"]).runs == "/home/p g"
    assert compose(["run=~/x"], "evaluate").run == "/home/p g/x"
    assert compose(["data=file", "data.path='~/x'"]).data.path == "~/x"
    assert compose(["data=file", "data.path='a,~/x'"]).data.path == "a,~/x"
    assert compose(["run=x", "prompt=~/x"], "sample").prompt == "~/x"


def test_quoted_elements_of_a_list_stay_as_they_are():
    given = quoted("""data.path=['a, b (1).txt',金庸.txt, it's.txt,"c d.txt"]""")
    assert compose(["data=file", given]).data.path == ["a, b (1).txt", "金庸.txt", "it's.txt", "c d.txt"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "attn.position_weight._target_=attn.position_weights.Alibi",
            "the yaml of attn.position_weight does not fit attn.position_weights.Alibi: got an unexpected keyword",
        ),
        ("attn.position_weight._target_=os.system", "attn.position_weight._target_=os.system is refused: no file in "),
        ("attn.value_heads=3", "value_heads must divide dim: value_heads=3, dim=128"),
    ],
)
def test_an_attention_that_cannot_be_built_is_explained(given, message):
    with pytest.raises(UserError, match=message):
        models.build.build_model(compose(["attn=mha_plus", given]), 16)


@pytest.mark.parametrize("attn", ["gmlp", "rwv"])
def test_an_attention_that_needs_w_is_not_built_without_it(attn):
    cfg = compose([f"attn={attn}"])
    cfg.attn.position_weight = None
    with pytest.raises(UserError, match="needs a position_weight: got null"):
        models.build.build_model(cfg, 16)


def test_a_file_of_configs_that_is_not_yaml_is_named(chosen, monkeypatch, tmp_path):
    chosen({"attn/mine": "heads: [8"})
    for module in (models.build, config_help):
        monkeypatch.setattr(module, "CONFIGS", folder.CONFIGS)
    models.build.known_targets.cache_clear()
    with pytest.raises(
        UserError, match=r"^\S+attn/mine\.yaml is not a config in YAML: while parsing a flow sequence.+$"
    ):
        models.build.build_model(compose(["attn=aft"]), 16)
    (tmp_path / "configs/attn/mine.yaml").write_text("# nothing but a comment\n")
    assert not list(comments_of(tmp_path / "configs/attn/mine.yaml"))
    assert inheritance("attn", "mine") == ["mine"]


def test_a_folder_of_configs_that_a_command_does_not_choose_from_is_no_group(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reproduce", "claim=[headline]"])
    with pytest.raises(SystemExit):
        reproduce.run()
    assert capsys.readouterr().err == "error: there is no key claim, did you mean claims?\n"


@pytest.mark.parametrize(
    "value",
    ["a.txt", "金庸.txt", "a b.txt", "a=b", "(1).txt", "it's.txt", "[金.txt,b.txt]", "*.txt", r"金\a.txt", "金\\"],
)
def test_values_outside_hydra_s_grammar_are_not_changed(value):
    config = compose(["data=file", quoted(f"data.path={value}")])
    assert config.data.path == (value if not value.startswith("[") else value[1:-1].split(","))

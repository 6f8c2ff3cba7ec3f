"""From a command line to a config with a name, or to one line that says what is wrong."""

import contextlib
import difflib
import errno
import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from configs.signals import WITH_PARENT, end_with_parent
from data.files import UserError, out_of_memory

CONFIGS = Path(__file__).parent
MISTAKES = (UserError, HydraException, OmegaConfBaseException)
TEXTS = ("prompt", "replace", "match")  # keys whose value is text as it stands, 1998 and a,b too
LONGEST = 200  # bytes of a run's name, before its seed: a file system has 255
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # which a terminal may obey
NO_PATH = (errno.ENAMETOOLONG, errno.EACCES)  # of a path that was given, which pathlib raises when it looks there
WAIT = 5.0  # seconds that a process gives the first one to say what is wrong
# Keys that do not decide what a run is: the same run may be continued with others.
CIRCUMSTANCES = (
    "job", "claim", "runs", "resume", "wandb",
    "data.cache", "data.processes", "data.source.cache", "data.source.downloads",
    "train.device", "train.compile", "train.log_every", "train.checkpoint_seconds",
    "train.parallel", "train.accumulate", "model.checkpointing", "evaluation.sample",
)  # fmt: skip

# What keys hold that have no default to go by.
WITHOUT_DEFAULT = {
    **dict.fromkeys(
        ("vocab_size", "key_size", "logit_heads", "value_heads", "hidden", "windows", "top_k"), (int, type(None))
    ),
    **dict.fromkeys(("encoding", "revision", "tier", "replace", "folder"), (str, type(None))),
    **dict.fromkeys(("top_p", "top_p_x", "min_p", "top_a"), (float, type(None))),
    **dict.fromkeys(("processes", "context", "stop", "stride"), (int, type(None))),
    **dict.fromkeys(("budget", "clip"), (float, type(None))),
    "compile": (bool, type(None)),
    **dict.fromkeys(("variants", "claims"), (list, type(None))),
    "time": (type(None),),
    "path": (str, list),
    "run": (str,),
}

# What the numbers of keys that end in these words are at least, those of a list too.
LEAST = {
    **dict.fromkeys(("batch", "characters", "context", "contexts", "jobs", "length", "lengths", "longer"), 1),
    **dict.fromkeys(("processes", "repeats", "rungs", "samples", "tokens", "trials", "vocabulary", "windows"), 1),
    **dict.fromkeys(("budget", "limit", "seconds", "seed", "seeds", "committed_seeds", "warm_up"), 0),
}

# Keys of a command that may be null though their default is not.
MAY_BE_NULL = {("table", "runs")}

# configs/hydra/launcher/ sets keys of the launchers' own configs, by the same names.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


def main(config_name: str, after_sweep: Callable[[list[Path]], None] | None = None) -> Callable:
    """Make task(cfg) a command: `key=value` arguments, Hydra's -m for sweeps, --help, --cfg job.

    Bad input ends with one line on stderr and exit status 2. In a sweep each job runs whatever
    became of the others, in whatever process a launcher runs it; those that failed are named at the
    end, and the exit status is 1. What the task returns is what a sweeper that searches is told; where
    several jobs return a Result, `after_sweep` is called with the folders of their runs before that.
    Of several processes that torchrun started, the first one says what is wrong, and a failure ends
    a sweep, since they must stay in step.
    """

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], None]:
        @functools.wraps(task)
        def job(cfg: DictConfig) -> object:
            settings = HydraConfig.get()
            overrides = settings.overrides.task
            print_without_fail()  # once more where a launcher runs the job in another process
            of_a_launcher = multiprocessing.parent_process() is not None  # joblib's
            if of_a_launcher or process_count() > 1 or WITH_PARENT in os.environ:
                end_with_parent()
            try:
                return task(complete(cfg, config_name, settings.runtime.choices, overrides))
            except Exception as error:
                if out_of_memory(error) and not isinstance(error, MISTAKES):
                    error = UserError(f"there is not enough memory: {explain(error, config_name)}")
                if isinstance(error, OSError) and error.filename and error.errno in NO_PATH:
                    error = UserError(f"cannot use {error.filename}: {error.strerror}")
                if not isinstance(error, MISTAKES):
                    traceback.print_exc()
                line = explain(error, config_name)
                if settings.mode == RunMode.MULTIRUN and process_count() == 1:
                    line = f"{' '.join(overrides)}: {line}"
                    print(f"failed: {line}", file=sys.stderr, flush=True)
                    return Failure(line)
                if isinstance(error, MISTAKES):
                    give_up(line, status=2)
                tell_torchrun(line)
                sys.exit(1)

        def run() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then leaves its errors to us
            print_without_fail()
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while the script was imported
                signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that what is open is closed
            try:
                sys.argv[1:] = [quoted(argument) for argument in sys.argv[1:]]
                hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(job)()
                if after_sweep and len(Result.folders) > 1:
                    after_sweep(Result.folders)
            except (*MISTAKES, ValueError) as error:  # Hydra raises bare ValueErrors too
                give_up(explain(error, config_name), status=2)
            except KeyboardInterrupt:
                give_up("interrupted", status=130)
            except Exception as error:  # a launcher's, which could not start a job, or lost it
                give_up("\n  ".join([explain(error, config_name), *Failure.known]), status=1)
            if Failure.known:
                give_up("\n  ".join([f"{len(Failure.known)} of the sweep's jobs failed:", *Failure.known]), status=1)

        return run

    return decorate


class Lossy(io.FileIO):
    """A file in which what cannot be written, to a pipe that nobody reads or a full disk, is lost without an error."""

    def write(self, content: bytes) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


class Output(io.TextIOWrapper):
    """What is printed: on a terminal without characters that it would obey, as a text or a record may hold them."""

    def write(self, text: str) -> int:
        return super().write(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if self.isatty() else text)


def print_without_fail() -> None:
    """From now on printing neither fails nor ends a run, whatever becomes of who reads it, and in any locale."""
    # Where a stream is closed, the next file that is opened would take its place, and what libraries print go there.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    for name, kind, errors in (("stdout", Output, "replace"), ("stderr", io.TextIOWrapper, "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, open until the process ends
        elif stream is getattr(sys, f"__{name}__"):  # nobody has put another one in its place
            stream.flush()
            raw = io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False))
            wrapped = kind(
                raw,
                encoding=stream.encoding,
                errors=errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, wrapped)


class Failure(Exception):
    """What a failed job of a sweep returns. Wherever one is made, or arrives from a launcher's worker, it is known."""

    known: ClassVar[list[str]] = []

    def __init__(self, line: str):  # which unpickling calls too
        super().__init__(line)
        self.known.append(line)


class Result(float):
    """The figure that a job tells a sweeper, and the folder of the job's run, which is known wherever Failures are."""

    folders: ClassVar[list[Path]] = []

    def __new__(cls, value: float, folder: Path):  # which unpickling calls too
        self = super().__new__(cls, value)
        self.folder = folder
        cls.folders.append(folder)
        return self

    def __getnewargs__(self) -> tuple[float, Path]:
        return float(self), self.folder


def give_up(message: str, status: int) -> None:
    """End with one line; of torchrun's processes the first says it, and the others wait for torchrun to end them."""
    tell_torchrun(message)
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(WAIT)
    sys.exit(status)


def process_count() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def tell_torchrun(message: str) -> None:
    """Leave the message where torchrun, if that started us, looks for what to say at its own end."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is open any more
        details = {"py_callstack": message, "timestamp": int(time.time())}
        content = json.dumps({"message": {"message": message, "extraInfo": details}})
        Path(path).write_text(content, encoding="utf-8")


def compose(overrides: list[str], config_name: str = "config") -> DictConfig:
    """The config that a command line with these overrides gives; for scripts and tests."""
    overrides = [quoted(override) for override in overrides]
    with ready():
        whole = hydra.compose(config_name, overrides, return_hydra_config=True)
        choices = whole.hydra.runtime.choices
        cfg = OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"])
        return complete(cfg, config_name, choices, overrides)


@functools.cache
def plain(config_name: str, groups: tuple[str, ...]) -> DictConfig:
    """What is composed without a value overridden, `hydra` and all; not to be changed."""
    return hydra.compose(config_name, list(groups), return_hydra_config=True)


def check_at_least(cfg: DictConfig, least: dict[str, int]) -> None:
    """Raise UserError for a number that is below what its key allows."""
    for key, number in least.items():
        if OmegaConf.select(cfg, key) < number:
            raise UserError(f"{key} must be {number} or more: got {OmegaConf.select(cfg, key)}")


def check_numbers(key: str, value: object) -> None:
    """Raise UserError for an empty list, and for a number, or one in a list, that is below what its key allows."""
    if value == []:
        raise UserError(f"{key} must not be empty")
    least = LEAST.get(key.rsplit(".", 1)[-1])
    numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, (int, float))]
    if least is not None and not all(number >= least for number in numbers):
        raise UserError(f"{key} must be {least} or more: got {value}")


def check_types(cfg: DictConfig, usual: DictConfig, choices: dict, wrong: str) -> None:
    """Raise UserError for a value of a config, read from a file, that is not of the kind it is in the usual one."""
    values, defaults = flat(cfg, resolve=True), flat(usual, resolve=True)
    for part in {key.rpartition(".")[0] for key in defaults} & values.keys():
        raise UserError(f"{wrong}: {part} must hold keys of its own: it is {values[part]}")
    for key, default in defaults.items():
        if any(other.startswith(f"{key}.") for other in values) and default != {}:
            raise UserError(f"{wrong}: {key} must be one value, like {default}")
        if key not in values or default == "???":
            continue
        kinds = kinds_of(key, default, usual)
        with ready():
            if values[key] is None and default is not None and not null_without_experiment(key, "config", choices):
                kinds = tuple(kind for kind in kinds if kind is not type(None))
        if not fits_like(values[key], kinds, default):
            raise UserError(f"{wrong}: {key} must be {expected(kinds, default)}: it is {values[key]}")


def check_seed(seed: int) -> None:
    """Raise UserError for a seed that torch cannot take."""
    if seed >= 2**63:
        raise UserError(f"seed must be below 2^63: got {seed}")


def ready() -> contextlib.AbstractContextManager:
    """Hydra with our config folder, which a command has already and a test has not."""
    if GlobalHydra.instance().is_initialized():
        return contextlib.nullcontext()
    return hydra.initialize_config_dir(str(CONFIGS), version_base="1.3")


def complete(cfg: DictConfig, config_name: str, choices: dict, overrides: list[str]) -> DictConfig:
    """Check the overridden keys against the config files and name the job by what sets it apart.

    Adds `job`: the experiment, the attention, the command, and a name that holds every difference
    to what `experiment=... attn=...` alone would give, and the seed. A learning rate from configs/rates
    is such a difference too, so that a name means the same run whatever rates are chosen later.
    """
    groups = [o for o in overrides if o.split("=")[0].lstrip("+~") in choices.keys() - {"rates"}]
    if "experiment" in choices:
        groups.append("rates=none")
    plain_config = plain(config_name, tuple(groups))
    base = {key: value for key, value in flat(plain_config).items() if not key.startswith("hydra.")}
    given = flat(cfg)
    for key, value in given.items():
        if value == "???":
            raise UserError(f"{key} is missing: give {key}=...")
    for key in given:
        if key not in base:
            inside = [k for k in base if k.startswith(key + ".")]
            raise UserError(f"{key} holds several keys: give {inside[0]}=..." if inside else unknown_key(key, base))
    for key, default in base.items():
        if key not in given:
            raise UserError(f"{key} is needed and cannot be taken away")
        if given[key] == default and type(given[key]) is type(default):
            continue
        if key.endswith("._partial_"):
            raise UserError(f"{key} is how a part is made, and cannot be set")
        kinds = kinds_of(key, default, plain_config)
        if given[key] is None and (config_name, key) in MAY_BE_NULL:
            continue
        if default is not None and given[key] is None and not null_without_experiment(key, config_name, choices):
            kinds = tuple(kind for kind in kinds if kind is not type(None))
        if list in kinds and str not in kinds and not fits(given[key], kinds):  # one value where a list is wanted
            given[key] = [given[key]]
            OmegaConf.update(cfg, key, given[key])
        if not fits_like(resolved(cfg, key), kinds, default):
            raise UserError(f"{key} must be {expected(kinds, default)}: got {given[key]}")
        check_numbers(key, given[key])
        if isinstance(given[key], float) and float not in kinds and int in kinds:
            given[key] = int(given[key])  # 1e4 steps
            OmegaConf.update(cfg, key, given[key])
    if "experiment" not in choices:
        return cfg

    usual = plain(config_name, (f"experiment={choices['experiment']}", f"attn={choices['attn']}")).hydra.runtime.choices
    files = {group for group in choices if group != "rates" and not group.startswith("hydra/")}
    parts = [choices[group] for group in choices if group in files and choices[group] != usual.get(group)]
    differences = {k: v for k, v in given.items() if v != base[k] and k != "seed" and not circumstance(k)}
    short = short_names(base)
    parts += [f"{short[k]}={brief(v)}" for k, v in sorted(differences.items())]
    name = "-".join([choices["attn"], *parts])
    long = len(name) > 100 or len(name.encode(errors="replace")) > LONGEST
    if long or any(brief(v).lower() != str(v).lower() for v in differences.values()):
        exact = hashlib.sha256(json.dumps([parts, differences], sort_keys=True, default=str).encode()).hexdigest()
        cut = name[:100].encode(errors="replace")[:LONGEST].decode(errors="ignore")
        name = f"{cut}-{exact[:6]}"
    name = f"{name}-seed{cfg.seed}"
    start = "python" if process_count() == 1 else f"torchrun --nproc-per-node={process_count()}"
    with open_dict(cfg):
        cfg.job = {
            "experiment": choices["experiment"],
            "attn": choices["attn"],
            "name": name,
            "command": command_line(f"{start} train.py", overrides),
        }
    return cfg


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """A key's last word, where no earlier one ends in it: model.heads is heads, attn.heads stays."""
    first = {}
    for key in keys:
        first.setdefault(key.rsplit(".", 1)[-1], key)
    return {key: word if first[word] == key else key for key in keys for word in [key.rsplit(".", 1)[-1]]}


def circumstance(key: str) -> bool:
    return any(key == c or key.startswith(c + ".") for c in CIRCUMSTANCES)


def flat(cfg: DictConfig | dict, resolve: bool = False) -> dict:
    """{"model.dim": 512, ...}; lists are values."""

    def walk(node: dict, prefix: str):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(OmegaConf.to_container(cfg, resolve=resolve) if isinstance(cfg, DictConfig) else cfg, ""))


def kinds_of(key: str, default: object, config: DictConfig) -> tuple[type, ...]:
    """What a key may hold, by its default; () where there is nothing to go by."""
    if default in (None, "???"):
        return WITHOUT_DEFAULT.get(key.rsplit(".", 1)[-1], ())
    if isinstance(default, str) and "${" in default:
        try:
            default = OmegaConf.select(config, key)
        except OmegaConfBaseException:  # it points at a key that is still missing
            return ()
    if default is None or isinstance(default, dict):
        return ()
    # An experiment may have set what was null.
    kinds = (type(default), *WITHOUT_DEFAULT.get(key.rsplit(".", 1)[-1], ()))
    return tuple(dict.fromkeys(kinds))


def null_without_experiment(key: str, config_name: str, choices: dict) -> bool:
    """Whether a key is null unless the chosen experiment sets it."""
    if "experiment" not in choices:
        return False
    groups = (
        f"{group}={choice}"
        for group, choice in choices.items()
        if "/" not in group and group not in ("experiment", "rates")
    )
    return OmegaConf.select(plain(config_name, (*groups, "rates=none", "~experiment")), key) is None


def resolved(cfg: DictConfig, key: str) -> object:
    """The value of a key, with what it points at in its place."""
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value


def fits_like(value: object, kinds: tuple[type, ...], default: object) -> bool:
    """Whether a value is of one of the kinds; and if it is a list, its elements of the kind of the default's."""
    elements = value if isinstance(value, list) and isinstance(default, list) and default else []
    return fits(value, kinds) and all(fits(element, (type(default[0]),)) for element in elements)


def fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of the kinds."""
    if not kinds or type(value) in kinds:
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return float in kinds
    return isinstance(value, float) and int in kinds and value.is_integer()


def expected(kinds: tuple[type, ...], default: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}
    names |= {type(None): "null", dict: "a part with keys of its own"}
    what = " or ".join(names[kind] for kind in kinds)
    return what if default in (None, "???") else f"{what}, like {default}"


def brief(value: object) -> str:
    """A value as part of a folder's name."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"[^\w.+-]+", "_", Path(text).stem if "/" in text else text)[:40]


def quoted(argument: str) -> str:
    """Quote the value of key=value where it is text, and where Hydra's grammar, made for ASCII, cannot read it."""
    key, equals, value = argument.partition("=")
    if not equals or argument.startswith("-"):
        return argument
    if re.fullmatch(r"\w+", key) and (CONFIGS / key).is_dir() and value.startswith("["):
        raise UserError(f"{key} is one of the files in configs/{key}, not a list: got {value}")
    if key in TEXTS and not re.fullmatch(r"null|(['\"]).*\1", value, re.DOTALL):
        return f"{key}={quote(value)}"
    if key not in TEXTS:
        value = re.sub(r"(?<![^\[,])~(?=/|$)", lambda _: os.path.expanduser("~"), value)  # as a shell does elsewhere
    try:
        OverridesParser.create().parse_override(f"{key}={value}")
        return f"{key}={value}"
    except (OverrideParseException, HydraException):
        if value.startswith("[") and value.endswith("]"):
            return f"{key}=[{','.join(quote(v) for v in value[1:-1].split(','))}]"
        return f"{key}={quote(value)}"


def quote(value: str) -> str:
    """In single quotes, in which a backslash stands for itself except before a quote or at the end."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value) + "'"


def command_line(start: str, arguments: list[str]) -> str:
    """The command that has these arguments, as one types it: without the quotes that quoted() puts around values."""
    return " ".join([start, *map(in_a_shell, map(unquoted, arguments))])


def unquoted(argument: str) -> str:
    """What quoted() makes this argument of, where there is something shorter than itself."""
    key, _, value = argument.partition("=")
    if "'" not in value:
        return argument
    try:
        value = OverridesParser.create().parse_override(argument).value()
    except (OverrideParseException, HydraException):
        return argument
    short = f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={value}"
    return short if quoted(short) == argument else argument


def in_a_shell(word: str) -> str:
    """A word of a command as a shell reads it; in double quotes where it has single ones."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


def explain(error: BaseException, config_name: str) -> str:
    """What is wrong, in one line, without what a terminal would obey, as a stranger's record may hold it."""
    line = " ".join(what_is_wrong(error, config_name).splitlines())
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", line)


def what_is_wrong(error: BaseException, config_name: str) -> str:
    if isinstance(error.__cause__, UserError):  # raised in a constructor that Hydra called
        error = error.__cause__
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, choice = re.fullmatch(r"((?:hydra/)?[^/]*)/(.*)", error.missing_cfg_file, re.DOTALL).groups()
        close = nearest(choice, error.options)
        own = f"; a text of your own is data=file data.path={choice}" if group == "data" and not close else ""
        return f"there is no {group}={choice}{close}; there are {', '.join(error.options)}{own}"
    key = re.match(r"Could not (?:override|append|delete)[^']*'([^']+)'", str(error))
    if isinstance(error, ConfigCompositionException) and key:
        return unknown_key(key[1].split("=")[0], known_keys(config_name))
    several = re.match(r"Ambiguous value for argument '(.*?)'\n1", str(error), re.DOTALL)
    if several:
        key, _, values = several[1].partition("=")
        if isinstance(known_keys(config_name).get(key), list):
            return f"{key} is a list: give {key}=[{values}]"
        return f"{several[1]} gives several values: -m {several[1]} makes a run of each"
    if isinstance(error, OverrideParseException) and "=" not in error.override:
        known = known_keys(config_name)
        right = f"give {error.override}=..." if error.override in known else "--help lists the keys"
        right = f"give run={error.override}" if "run" in known and Path(error.override).exists() else right
        return f"arguments are key=value: got {error.override}; {right}"
    if "Unknown plugin class" in str(error):
        return f"{error}: pip install -r requirements-extra.txt, for ray requirements-ray.txt"
    message = str(error).split("\n-----")[0]  # submitit goes on with all that the job printed
    text = "\n".join(line for line in message.splitlines() if "See https" not in line)
    return text if isinstance(error, (*MISTAKES, ValueError)) else f"{type(error).__name__}: {text}"


def unknown_key(key: str, known: dict) -> str:
    """Says that there is no such key among the known ones, and which one was meant or what there is instead."""
    part, _, rest = key.partition(".")
    inside = [k.removeprefix(f"{part}.") for k in known if k.startswith(f"{part}.") and not k.endswith("_")]
    files = sorted((CONFIGS / part).glob("*.yaml")) if inside and rest else []
    having = [path.stem for path in files if rest in flat(OmegaConf.load(path))]
    if having:
        return (
            f"there is no key {key} with this {part}; there is with {' or '.join(f'{part}={name}' for name in having)}"
        )
    there = f"; {part} has {', '.join(inside)}" if inside else "; --help lists the keys"
    return f"there is no key {key}{nearest(key, list(known)) or there}"


def nearest(word: str, words: list[str]) -> str:
    """ ", did you mean X?" for the nearest of the words, or nothing.

    Of dotted words the last parts have to be alike; those before them count less.
    """
    part, _, end = word.lower().rpartition(".")
    scores = {}
    for other in words:
        its_part, _, its_end = other.lower().rpartition(".")
        likeness = difflib.SequenceMatcher(None, end, its_end).ratio()
        if likeness >= (0.5 if part and part == its_part else 0.6) and not its_end.endswith("_"):  # _target_
            weight = 0.5 if part else 0.1
            scores[other] = likeness + weight * difflib.SequenceMatcher(None, part, its_part).ratio()
    return f", did you mean {max(scores, key=scores.get)}?" if scores else ""


def known_keys(config_name: str) -> dict:
    """The groups and keys, with their values, of the config with the command line's choices, where they exist."""
    for overrides in ([a for a in sys.argv[1:] if re.match(r"\w+=\w+$", a)], []):
        try:
            with ready():
                whole = hydra.compose(config_name, overrides, return_hydra_config=True)
        except HydraException:
            continue
        groups = {group: choice for group, choice in whole.hydra.runtime.choices.items() if "/" not in group}
        return groups | {key: value for key, value in flat(whole).items() if not key.startswith("hydra.")}
    return {}

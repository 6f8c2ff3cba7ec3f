"""Train without a writable folder, a home, a user, a network, a compiler, a login, or enough memory.

The run completes with the results of a run that lacks nothing, or fails with one line that names what is missing. After
a failure, a run that lacks nothing completes among the same folders.
"""

import pytest

from configs.cli import compose
from data import corpus
from tests.conftest import command
from tests.helpers.lacks import NOT_PERMITTED
from tests.helpers.runs import assert_mirrored, assert_refused, assert_the_same, folder_of, rows_of
from train import train

pytestmark = pytest.mark.slow

SLOWER = "training without torch.compile, which needs a C++ compiler: on a CPU this is 1.2 times slower"
NO_HUB = ["data=hub", "data.name=no/text"]


def train_without(what: str, *overrides: str):
    """Run train.py in a process from which `what` is taken. Skip the test if this machine does not permit that."""
    done = command("-m", "tests.helpers.lacks", what, *overrides)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr)
    return done


@pytest.fixture
def mirrored(tiny) -> list[str]:
    """Return overrides for a run that writes wandb's files too, which are not sent."""
    return [override for override in tiny if override != "wandb.mode=disabled"]


@pytest.mark.parametrize(
    ("what", "more", "words"),
    [
        ("home", [], ""),
        ("home's folder", [], ""),
        ("user's name", [], ""),
        ("compiler", ["train.compile=null"], SLOWER),
    ],
)
def test_a_run_completes_without_what_it_can_do_without(mirrored, tmp_path, what, more, words):
    done = train_without(what, *mirrored, *more)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    whole = compose([*mirrored, f"runs={tmp_path}/whole"])
    train(whole)
    assert_the_same(folder_of(compose(mirrored)), folder_of(whole))


@pytest.mark.parametrize(
    ("what", "more", "words"),
    [
        ("read-only:{}/runs", [], "Read-only file system"),
        ("read-only:{}/cache", [], "Read-only file system"),
        ("read-only:{}/mirror", ["wandb.dir={}/mirror"], "wandb.mode=disabled needs no folder"),
        ("user", [], "home directory"),
        ("network", ["data=sanguo"], "is there a network? A text of your own needs none"),
        ("network", NO_HUB, "cannot reach no/text on the hub"),
        ("compiler", ["train.compile=true"], "train.compile=true needs a C++ compiler"),
        ("login", ["wandb.mode=online"], "wandb.mode=offline needs no account"),
        ("memory", ["model.dim=4104"], "need more memory than there is"),
        ("memory", ["train.batch=60000"], "not enough memory for this run"),
    ],
)
def test_a_run_names_what_it_needs_and_completes_when_it_has_it(tiny, mirrored, tmp_path, what, more, words):
    usual = tiny if what == "memory" else mirrored
    if what == "memory":
        corpus.load(compose(tiny).data)  # tokenising would take most of the memory that is left
    if what == "network":  # other texts have no path
        usual = [override for override in usual if not override.startswith("data")]
        more = [*more, f"data.cache={tmp_path}/cache"]
    assert_refused(train_without(what.format(tmp_path), *usual, *(one.format(tmp_path) for one in more)), words)
    assert not list(tmp_path.rglob(".*"))  # nothing is left over
    train(compose(mirrored))
    whole = compose([*tiny, f"runs={tmp_path}/whole"])
    train(whole)
    assert_the_same(folder_of(compose(mirrored)), folder_of(whole))
    assert_mirrored(tmp_path, rows_of(folder_of(whole)))

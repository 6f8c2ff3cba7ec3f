"""Write the generated parts of the READMEs.

The text between the lines `<!-- include NAME -->` and `<!-- end -->` is replaced. NAME is one of `MADE`, or the path of
a page from the repository's root. Of a page that begins with a heading, the text between this heading and the first
section is included; any other page is included as a whole. The page's links become relative to the README.
"""

import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting import markdown
from scripts.reporting.attention_map import unified_form
from scripts.reporting.benchmark_pages import COMMAND, peers_table
from scripts.reporting.best_starts import HEADING
from scripts.reporting.claims import all_claims
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.findings import JUDGED, cells, findings
from scripts.reporting.recall import HARD
from scripts.reporting.recall_page import ABLE
from scripts.reporting.records import json_record
from scripts.reporting.variants import equations, header, variants

INCLUDE = re.compile(r"(<!-- include (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
LEADERBOARD, NOVEL_LEADERBOARD = "results/leaderboard.md", "results/leaderboard_novel.md"
BEST_STARTS = f"{LEADERBOARD}#{HEADING.lower().replace(' ', '-')}"
RECALL, DEPTH = "results/recall.md", "results/claims/small.md#depth"
LONGER = "results/QUALITY.md#2026-11-25-to-2026-11-27-associative-recall-of-8-and-16-pairs"
TOP = 8  # number of attentions of the leaderboard that the README shows
LEFT_OUT = ("best held-out", "held-out bits per byte", "learning rate", "seeds")  # columns that the README omits


def readmes(root: Path) -> list[Path]:
    """Return the READMEs of the repository and of its folders."""
    return [root / "README.md", *sorted(root.glob("[!.]*/README.md"))]


def filled(readme: Path, root: Path) -> str:
    """Return the text of a README, with every include taken from the files under `root`."""

    def fill(include: re.Match) -> str:
        name = include[2]
        content = MADE[name](root) if name in MADE else excerpt(root / name, readme.parent)
        return include[1] + content + include[3]

    return INCLUDE.sub(fill, readme.read_text(encoding="utf-8"))


def excerpt(path: Path, folder: Path) -> str:
    """Return the part of a page that a README in `folder` includes."""
    text = path.read_text(encoding="utf-8")
    if text.startswith("# "):
        text = text.partition("\n")[2].partition("\n## ")[0].strip() + "\n"
    return LINK.sub(lambda link: f"]({os.path.relpath(path.parent / link[1], folder)})", text)


def short_variants(_root: Path) -> str:
    """Return the names and labels of all attentions in one paragraph."""
    names = [f"{header(variant)['label']} (`{variant}`)" for variant in variants()]
    return f"There are {len(names)} attentions: {'; '.join(names)}.\n"


def leaderboard(root: Path) -> str:
    """Return a section with the top of the leaderboard by held-out perplexity; nothing if there is no such page."""
    head, rows = by_heldout(root)
    if not rows:
        return ""
    order = ["", "held-out", *(name for name in head[1:] if name not in ("held-out", *LEFT_OUT))]
    top = [[row[head.index(name)] for name in order] for row in rows[:TOP]]
    small = compose(["experiment=small"]).model
    page = (root / LEADERBOARD).read_text("utf-8")
    trained = re.search(r"^- small: (.+?), seeds? ", page, re.MULTILINE)[1]
    told = [
        f"The {len(top)} of {len(rows)} attentions with the lowest held-out perplexity, each in a small model "
        f"({small.layers} block, {small.dim} dim, context {small.context}; {trained}) at the learning rate that was "
        f"chosen for it{start_of_each(root)} [The leaderboard]({LEADERBOARD}) has all of them, leads over MHA+ and "
        f"plots; some were also trained [at the source's size]({NOVEL_LEADERBOARD}).",
        "Brackets after perplexities are 95% intervals over seeds, and those after speeds are quartiles over rounds. "
        "The speeds are those of small models on a CPU, without compilation. Compiled, at the source's size and on a "
        "GPU, the order differs ([speed](results/README.md#speed)). A block of a GAU or of FLASH has two attention "
        "layers and no feed-forward. The state is what an attention keeps to write text after a full context.",
    ]
    if "recall, %" in order:
        told.append(
            f"Recall: correct answers in [associative recall]({RECALL}) with {HARD}, the mean over seeds and, in "
            "brackets, the lowest and the highest. These are other models, all with the plain start and trained on "
            "this task. A low figure may mean that an attention learns it slowly."
        )
    return markdown.page("## The leaderboard", markdown.table(top, order), markdown.notes(*told))


def by_heldout(root: Path) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the leaderboard, the lowest held-out perplexity first; [], [] without its page.

    If all attentions are in its section of best starts, the perplexities are those of this section. Rows without a
    held-out perplexity are left out.
    """
    if not (root / LEADERBOARD).exists():
        return [], []
    head, *rows = cells(root / LEADERBOARD)
    heldout, best = head.index("held-out"), from_best_starts(root)
    for row in rows if best else []:
        for column in ("fit perplexity", "held-out"):
            row[head.index(column)] = best[row[0]][column]
    scored = [row for row in rows if row[heldout] != NO_FIGURE]
    return head, sorted(scored, key=lambda row: float(row[heldout].split()[0]))


def from_best_starts(root: Path) -> dict[str, dict[str, str]]:
    """Return the rows of the leaderboard's section of best starts, by label, as {column: cell}.

    Returns {} unless all attentions of the leaderboard are in this section.
    """
    head, *rows = cells(root / LEADERBOARD, f"## {HEADING}") or [[]]
    best = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    return best if best.keys() >= {row[0] for row in cells(root / LEADERBOARD)[1:]} else {}


def start_of_each(root: Path) -> str:
    """Return how a sentence on the leaderboard ends, which names the starts, and a sentence on what the best ones gain.

    There is no second sentence unless all attentions are in the leaderboard's section of best starts.
    """
    best = from_best_starts(root)
    if not best:
        return ", and from the start (initialisation) that train.py uses."
    gained = {name: row["gain"].partition("%") for name, row in best.items()}
    gains = {name: float(percent) for name, (percent, sign, _) in gained.items() if sign}
    most = max(gains, key=gains.get)
    return (
        f", and from the [start that fits best]({BEST_STARTS}) of those that were tried (initialisations); the rate "
        "was chosen with the start that train.py uses. Where the two starts differ, the best one fits better by up to "
        f"{gains[most]:.1f}% ({most}), in the median {statistics.median(gains.values()):.1f}%."
    )


def answer(root: Path) -> str:
    """Return the summary of the README, a sentence and a list, or "" if there is no leaderboard.

    It names the attentions with the lowest held-out perplexity, their recall, and the verdicts on claim `headline`.
    """
    head, rows = by_heldout(root)
    if not rows:
        return ""
    best = "; ".join(f"{row[0]} {row[head.index('held-out')]}" for row in rows[:3])
    started = f", each from the [start that fits best]({BEST_STARTS}) of those tried" * bool(from_best_starts(root))
    told = [
        f"Of small models, these have the lowest held-out perplexity on a novel{started}: {best}.",
        at_the_source_size(root, rows[0][0]),
        recall(head, rows),
        constant_state(head, rows),
        source_order(root),
    ]
    intro = f"**In short**, for models of one block (deeper ones were [hardly tried]({DEPTH})):\n"
    return intro + markdown.notes(*filter(None, told)) + "\n"


def at_the_source_size(root: Path, first: str) -> str:
    """Return a sentence with the lowest held-out perplexities in models of the source's size.

    It also has the perplexity of `first`, the best of the small models. Returns "" if these models have no page.
    """
    if not (root / NOVEL_LEADERBOARD).exists():
        return ""
    head, *rows = cells(root / NOVEL_LEADERBOARD)
    lowest = {row[0]: row[head.index("best held-out")].split()[0] for row in rows}
    order = sorted((name for name in lowest if lowest[name] != NO_FIGURE), key=lambda name: float(lowest[name]))
    if not order:
        return ""
    best = "; ".join(f"{name} {lowest[name]}" for name in order[:3])
    also = f"; {first} has {lowest[first]}" if first in order[3:] else ""
    return (
        f"At the source's size, where only [{len(order)} attentions]({NOVEL_LEADERBOARD}) were trained, these have the "
        f"lowest held-out perplexity during training: {best}{also}."
    )


def constant_state(head: list[str], rows: list[list[str]]) -> str:
    """Return a sentence on small models whose state does not grow with the text, or "" if it names none."""
    state, heldout = head.index("state, bytes"), head.index("held-out")
    constant = [row for row in rows if row[state] != NO_FIGURE and not row[state].endswith("grows")]
    if not constant or "recall, %" not in head:
        return ""
    recalled = head.index("recall, %")
    able = [row for row in constant if row[recalled] != NO_FIGURE and float(row[recalled].split()[0]) > ABLE]
    told = [
        f"{row[0]} has the lowest held-out perplexity, {row[heldout].split()[0]}" for row in (*constant[:1], *able[:1])
    ]
    also = f"; of those among them that recall more than {ABLE}%, {told[1]}" if able else ""
    return f"Of the small models whose state does not grow with the text, {told[0]}{also}."


def recall(head: list[str], rows: list[list[str]]) -> str:
    """Return two sentences, or "" if one of them would name no attention.

    The first sentence has the recall of the first three rows. The second one names the first three rows with a recall
    above ABLE percent.
    """
    if "recall, %" not in head:
        return ""
    column = head.index("recall, %")
    recalled = {row[0]: row[column].split()[0] for row in rows if row[column] != NO_FIGURE}
    first = [f"{row[0]} {recalled[row[0]]}%" for row in rows[:3] if row[0] in recalled]
    able = [name for name, share in recalled.items() if float(share) > ABLE][:3]
    if not first or not able:
        return ""
    steps = compose(["experiment=recall"]).train.steps
    return (
        f"When the same attentions are trained for {steps} steps, from the plain start, to [recall values from the "
        f"context]({RECALL}), these shares of their answers are correct: {'; '.join(first)}; [more steps]({LONGER}) "
        f"help some. Of the attentions with more than {ABLE}%, these have the lowest held-out perplexity on the novel: "
        f"{'; '.join(able)}."
    )


def source_order(root: Path) -> str:
    """Return a sentence with the verdicts on claim `headline` at the tiers novel and source; "" if one is missing."""
    page = root / "results/CLAIMS.md"
    if not page.exists():
        return ""
    head, *rows = cells(page)
    (row,) = (row for row in rows if row[head.index("claim")] == all_claims()["headline"].says)
    novel, source = (JUDGED.match(row[head.index(f"{tier} tier")]) for tier in ("novel", "source"))
    if not novel or not source:
        return ""
    return (
        f"Whether the source's order AFT, MHA+, gMLP holds for models of the source's size is {novel[1]} on the novel "
        f"and {source[1]} on a mixed text; it depends on [the settings](#what-was-found)."
    )


def peers(root: Path) -> str:
    """Return the table of our layers beside public ones, in float32 on the CPU."""
    return peers_table(json_record(root / "results/benchmark/cpu/float32/layers.json", COMMAND))


MADE: dict[str, Callable[[Path], str]] = {
    "answer": answer,
    "findings": findings,
    "leaderboard": leaderboard,
    "variants": short_variants,
    "equations": lambda _: equations(),
    "map": lambda _: unified_form(),
    "peers": peers,
}


def write(root: Path) -> None:
    """Fill the includes of all READMEs."""
    for readme in readmes(root):
        write_bytes(readme, filled(readme, root).encode())

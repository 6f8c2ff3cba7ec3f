"""Write the generated parts of the READMEs.

The text between the lines `<!-- include NAME -->` and `<!-- end -->` is replaced. NAME is one of `MADE`, or the path of
a page from the repository's root. Of a page that begins with a heading, the text between this heading and the first
section is included; any other page is included as a whole. The page's links become relative to the README.
"""

import math
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
from scripts.reporting.best_starts import ANCHOR, HEADING
from scripts.reporting.claims import all_claims, seeds
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.findings import COMPARISONS, JUDGED, STATED, comparison, findings, reference_heldout, rows_of
from scripts.reporting.rates import USUAL, heldout_heading
from scripts.reporting.recall import BY_VALUES, HARD
from scripts.reporting.recall_page import ABLE
from scripts.reporting.records import json_record, label, without_token_shift
from scripts.reporting.variants import equations, header, same_in_one_block, variants

INCLUDE = re.compile(r"(<!-- include (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BOLD = re.compile(r"\*\*([\d.]+)\*\*")
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
LEADERBOARD, NOVEL_LEADERBOARD = "results/leaderboard.md", "results/leaderboard_novel.md"
BEST_STARTS = f"{LEADERBOARD}#{ANCHOR}"
RATES_PAGE = "results/rates.md"
RECALL, DEPTH = "results/recall.md", "results/claims/small.md#depth"
LONGER = "results/QUALITY.md#2026-11-25-to-2026-11-27-associative-recall-of-8-and-16-pairs"
RULE = "results/CLAIMS.md#how-a-verdict-is-reached"
HEADLINE, AUTHOR_CODE = ("headline", "novel"), ("author_code", "novel")  # a claim and a tier
LEADS = "## Leads"  # a heading of the leaderboard
RECALLED = "recall, %"  # a column of the leaderboard
HELDOUT = "best held-out"  # a column of the leaderboard, by which the README sorts it
HELDOUT_LEAD = "held-out lead over "  # how the name of a column of the leaderboard begins
TOP = 8  # number of attentions of the leaderboard that the README shows
LEFT_OUT = ("held-out", "held-out bits per byte", "learning rate", "seeds")  # columns that the README omits


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
    """Return a section with the top of the leaderboard by best held-out perplexity; nothing without this page."""
    rows = by_heldout(root)
    if not rows:
        return ""
    over, leads = shown_leads(root)
    first = ["", HELDOUT, f"{HELDOUT_LEAD}{over}"]
    order = [*first, *(name for name in rows[0] if name not in (*first, *LEFT_OUT))]
    top = [row | {first[2]: leads.get(row[""], NO_FIGURE)} for row in rows[:TOP]]
    small, names = compose(["experiment=small"]).model, {row[""] for row in rows}
    shown = [variant for variant in variants() if label(variant) in names]
    page = (root / LEADERBOARD).read_text("utf-8")
    trained, seeds_and_device = re.search(r"^- small: (.+?), (seeds? .+?); commits? ", page, re.MULTILINE).groups()
    told = [
        f"The {len(top)} of {len(rows)} attentions with the lowest held-out perplexity during training, each in a "
        f"small model ({small.layers} block, {small.dim} dim, context {small.context}; {trained}) at the learning rate "
        f"that was chosen for it{start_of_each(root)} [The leaderboard]({LEADERBOARD}) has all of them, all leads and "
        "plots, but not RWV, which with its default settings is AFT. Some were also trained [at the source's "
        f"size]({NOVEL_LEADERBOARD}). MHATW is multi-head attention (MHA) with time-weighting; AFT is the "
        "source's, and AFT-full the one that was published first. Most of these models have a token shift, which "
        "ordinary transformers lack ([glossary](attn/README.md#glossary)). "
        f"{without_token_shift(shown, 'small')}".strip(),
        f"All {len(rows)} were trained with {seeds_and_device} ([the precision of each]({LEADERBOARD}))."
        f"{at_the_end(top, trained)} "
        "The ± is a standard deviation over seeds. Brackets after perplexities are 95% intervals over seeds, and those "
        "after speeds are quartiles over rounds. Leads are differences of log perplexity. The speeds are those of "
        "small models on a CPU, without compilation. Compiled, at the source's size and on a GPU, the order differs "
        "([speed](results/README.md#speed)). The state is what an attention keeps to write text after a full context.",
    ]
    if RECALLED in order:
        told.append(
            f"Recall: correct answers in [associative recall]({RECALL}) with {HARD}, the mean over seeds and, in "
            "brackets, the lowest and the highest. These are other models, trained on this task from the plain start, "
            "and all with token shift. A low figure may mean that an attention learns it slowly."
        )
    told.append(same_in_one_block(shown))
    return markdown.page(
        "## The leaderboard",
        markdown.table([[row[name] for name in order] for row in top], order),
        markdown.notes(*told),
    )


def at_the_end(rows: list[dict[str, str]], trained: str) -> str:
    """Return a space and a sentence on how many of the rows have their lowest held-out perplexity about at the end.

    The passes of a row are a rounded mean over seeds, so that single seeds can be earlier. `trained` names the steps
    and the passes of the training. Returns "" if no row has it there.
    """
    passes = re.search(r"[\d.]+ pass(es)?", trained)[0]
    count = sum(row[HELDOUT].endswith(f"after {passes}") for row in rows)
    return (
        f" {count} of these {len(rows)} have their lowest held-out perplexity at the end of training or just before it "
        f"(after {passes}, a rounded mean over seeds): with longer training, the order can be another."
        if count
        else ""
    )


def by_heldout(root: Path) -> list[dict[str, str]]:
    """Return the rows of the leaderboard as {column: cell}, the lowest best held-out first; [] without its page.

    If all attentions are in its section of best starts, the perplexities are those of this section. Rows without a
    held-out perplexity are left out.
    """
    rows, best = rows_of(root / LEADERBOARD), from_best_starts(root)
    for row in rows if best else []:
        row |= {column: best[row[""]][column] for column in ("fit perplexity", HELDOUT)}
    scored = [row for row in rows if row[HELDOUT] != NO_FIGURE]
    return sorted(scored, key=lambda row: float(heldout(row)))


def heldout(row: dict[str, str]) -> str:
    """Return the best held-out perplexity of a row of the leaderboard, without its deviation."""
    return row[HELDOUT].split()[0]


def from_best_starts(root: Path) -> dict[str, dict[str, str]]:
    """Return the rows of the leaderboard's section of best starts, by label, as {column: cell}.

    Returns {} unless all attentions of the leaderboard are in this section.
    """
    best = {row[""]: row for row in rows_of(root / LEADERBOARD, f"## {HEADING}")}
    return best if best.keys() >= {row[""] for row in rows_of(root / LEADERBOARD)} else {}


def start_of_each(root: Path) -> str:
    """Return how a sentence on the leaderboard ends, which names the starts, and a sentence on what the best ones gain.

    There is no second sentence unless all attentions are in the leaderboard's section of best starts.
    """
    best = from_best_starts(root)
    if not best:
        return ", and from the start (initialisation) that train.py uses."
    gained = {name: row["gain"].partition("%") for name, row in best.items()}
    gains = {name: float(percent) for name, (percent, sign, _) in gained.items() if sign}
    least, most = min(gains, key=gains.get), max(gains, key=gains.get)
    return (
        f", and from the [start (initialisation) that fitted best]({BEST_STARTS}) with other seeds; the rate was "
        "chosen with the start that train.py uses. Where this is another start, the gain in log perplexity on "
        f"the training text is {gains[least] / 100:+.3f} ({least}) to {gains[most] / 100:+.3f} ({most}), in the median "
        f"{statistics.median(gains.values()) / 100:+.3f}."
    )


def heldout_leads(page: Path, heading: str) -> tuple[str, dict[str, str]]:
    """Return the attention that a page's column of held-out leads compares with, and the leads, {label: cell}.

    The column is in the first table after the heading. Returns "", {} without this table.
    """
    rows = rows_of(page, heading)
    name = next((name for row in rows for name in row if name.startswith(HELDOUT_LEAD)), "")
    return name.removeprefix(HELDOUT_LEAD), {row[""]: row[name] for row in rows if name}


def shown_leads(root: Path) -> tuple[str, dict[str, str]]:
    """Return what `heldout_leads` returns for the rows of `by_heldout`."""
    return heldout_leads(root / LEADERBOARD, f"## {HEADING}" if from_best_starts(root) else LEADS)


def answer(root: Path) -> str:
    """Return the summary of the README, a sentence and a list, or "" if there is no leaderboard.

    It names the attentions with the lowest held-out perplexity, their recall, and the verdicts on claim `headline`.
    """
    rows = by_heldout(root)
    if not rows:
        return ""
    best = "; ".join(f"{row['']} {heldout(row)}" for row in rows[:3])
    started = f", each from the [start that fitted best]({BEST_STARTS})" * bool(from_best_starts(root))
    told = [
        "Of small models that were trained on a Chinese novel, these have the lowest held-out perplexity during "
        f"training{started}: {best}.{verdicts(*shown_leads(root))}",
        at_the_source_size(root, rows[0][""]),
        recall(rows),
        constant_state(rows),
        source_order(root),
    ]
    intro = f"**In short**, for models of one block (deeper ones were [hardly tried]({DEPTH})):\n"
    return intro + markdown.notes(*filter(None, told)) + "\n"


def verdicts(over: str, leads: dict[str, str]) -> str:
    """Return a space and a sentence on the verdicts on leads over the attention `over`; "" without leads."""
    words = {name: cell.rpartition(", ")[2] for name, cell in leads.items() if cell != NO_FIGURE}
    if not words:
        return ""
    ahead = [name for name, word in words.items() if word == "ahead"]
    behind = sum(word == "behind" for word in words.values())
    rule = f"[the rule]({RULE})"
    if set(words.values()) == {"undecided"}:
        return f" By {rule}, none of the {len(words)} leads over {over} there is decided."
    first = f"{'; '.join(ahead) or 'none'} {'are' if len(ahead) > 1 else 'is'} ahead of {over}"
    others = f"{behind} of {len(words)} {'is' if behind == 1 else 'are'} behind {over}"
    return f" By {rule}, {first} there, and {others}."


def at_the_source_size(root: Path, first: str) -> str:
    """Return sentences on the lowest held-out perplexities in models of the source's size, and on leads over MHA+.

    It also has the perplexity of `first`, the best of the small models. Returns "" if these models have no page.
    """
    rows = rows_of(root / NOVEL_LEADERBOARD)
    lowest = {row[""]: heldout(row) for row in rows if row[HELDOUT] != NO_FIGURE}
    order = sorted(lowest, key=lambda name: float(lowest[name]))
    if not order:
        return ""
    counts = [int(re.match(r"\d+", row["seeds"])[0]) for row in rows]  # a cell may also be "1 of 3, 1 diverged"
    count = f"{max(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    also = f"; {first} has {lowest[first]}" if first in order[3:] else ""
    return (
        f"At the source's size, [{len(order)} attentions]({NOVEL_LEADERBOARD}) were trained, each with {count} seeds "
        "and the rate at which it fits best. These have the lowest held-out perplexity during training: "
        f"{'; '.join(f'{name} {lowest[name]}' for name in order[:3])}{also}."
        f"{verdicts(*heldout_leads(root / NOVEL_LEADERBOARD, LEADS))}{more_seeds(root)}"
        f"{other_settings(root, lowest)}"
    )


def more_seeds(root: Path) -> str:
    """Return a space and a sentence on the held-out leads over MHA+ in the headline; "" without these runs."""
    row = comparison(root, *HEADLINE, *COMPARISONS[HEADLINE])
    if not row:
        return ""
    count = len(seeds(all_claims()[HEADLINE[0]], HEADLINE[1]))
    (first, second), (ahead, also) = map(label, STATED), (row[4], row[6])
    return (
        f" With the {count} seeds of [the headline](#the-headline), {first}'s lead is {ahead}, {second}'s {also}; "
        "these are plain 95% intervals, and no verdict rests on them."
    )


def other_settings(root: Path, usual: dict[str, str]) -> str:
    """Return a space and a sentence on lower held-out perplexities of models of the source's size; "" without any.

    They are the lowest at any learning rate, and that of MHA+ with the settings of the author's public code, where
    these are below `usual`, {label: perplexity}.
    """
    rows = rows_of(root / RATES_PAGE, heldout_heading("novel", USUAL))
    by_rate = {row.pop(""): [cell for cell in row.values() if cell != NO_FIGURE] for row in rows}
    found = {name: bold[1] for name, cells in by_rate.items() if (bold := BOLD.search(" ".join(cells)))}
    lowest = {name: value for name, value in found.items() if float(value) < float(usual.get(name, math.inf))}
    first = sorted(lowest, key=lambda name: float(lowest[name]))[:3]
    told = []
    if first:
        best = "; ".join(f"{name} {lowest[name]}" for name in first)
        at_an_end = any(BOLD.match(by_rate[name][end]) for name in first for end in (0, -1))
        more = ", and other rates may be better still" * at_an_end
        told.append(f"at the best of the [rates that were tried]({RATES_PAGE}), two other seeds have {best}{more}")
    row = comparison(root, *AUTHOR_CODE, *COMPARISONS[AUTHOR_CODE])
    if row and reference_heldout(row) < float(usual.get(label("mha_plus"), math.inf)):
        code = "[the settings of the author's public code](#what-was-found)"
        told.append(f"with {code}, among them another feed-forward and optimiser, MHA+ has {row[2]}")
    return f" Other settings lower the held-out perplexity at this size: {'; '.join(told)}." if told else ""


def constant_state(rows: list[dict[str, str]]) -> str:
    """Return a sentence on small models whose state does not grow with the text, or "" if it names none."""
    constant = [row for row in rows if row["state, bytes"] != NO_FIGURE and not row["state, bytes"].endswith("grows")]
    if not constant or RECALLED not in constant[0]:
        return ""
    share = [row[RECALLED].split()[0] for row in constant]
    able = [row for row, part in zip(constant, share, strict=True) if part != NO_FIGURE and float(part) > ABLE]
    lowest = [f"{row['']} has the lowest held-out perplexity, {heldout(row)}" for row in constant[:1] + able[:1]]
    recalled = "" if share[0] == NO_FIGURE else f", and recalls {share[0]}%"
    also = f"; of those among them that recall more than {ABLE}%, {lowest[-1]}" if able else ""
    return f"Of small models whose state does not grow with the text, {lowest[0]}{recalled}{also}."


def recall(rows: list[dict[str, str]]) -> str:
    """Return sentences on recall, or "" if one of them would name no attention.

    The first one has the recall of the first three rows. The last one names the first three rows with a recall above
    ABLE percent.
    """
    measured = [row for row in rows if row.get(RECALLED, NO_FIGURE) != NO_FIGURE]
    first = [f"{row['']} {row[RECALLED].split()[0]}%" for row in measured if row in rows[:3]]
    able = [row for row in measured if float(row[RECALLED].split()[0]) > ABLE][:3]
    if not first or not able:
        return ""
    best = (f"{row['']} {heldout(row)}" for row in able)
    steps = compose(["experiment=recall"]).train.steps
    return (
        f"When the same attentions are trained for {steps} steps, from the plain start, to [recall values from the "
        f"context]({RECALL}), these shares of their answers are correct: {'; '.join(first)}. Always giving the most "
        f"frequent value of the context gives {BY_VALUES[HARD]:.1f}%; [more steps]({LONGER}) help some attentions. Of "
        f"those with more than {ABLE}%, these have the lowest held-out perplexity on the novel: {'; '.join(best)}."
    )


def source_order(root: Path) -> str:
    """Return a sentence with the verdicts on claim `headline` at each tier; "" if one is missing."""
    says = all_claims()["headline"].says
    row = next((row for row in rows_of(root / "results/CLAIMS.md") if row["claim"] == says), {})
    verdicts = [JUDGED.match(row.get(f"{tier} tier", "")) for tier in ("small", "novel", "source")]
    if None in verdicts:
        return ""
    small, novel, source = (verdict[1] for verdict in verdicts)
    return (
        f"The source's order AFT, MHA+, gMLP, judged by fit, is {small} by small models. At the source's size it is "
        f"{novel} on the novel and {source} on a mixed text, and depends on [the settings](#what-was-found)."
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

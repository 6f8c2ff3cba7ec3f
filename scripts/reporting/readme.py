"""Write the generated parts of the READMEs.

The text between the lines `<!-- include NAME -->` and `<!-- end -->` is replaced. NAME is one of `MADE`, or the path of
a page from the repository's root. Of a page that begins with a heading, the text between this heading and the first
section is included; any other page is included as a whole. The page's links become relative to the README.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from configs.cli import compose
from configs.folder import CONFIGS
from data.files import write_bytes
from scripts.reporting import markdown
from scripts.reporting.attention_map import unified_form
from scripts.reporting.benchmark_pages import COMMAND, peers_table
from scripts.reporting.claim_pages import COLUMNS, linked
from scripts.reporting.claims import all_claims, benchmark_record, samples, summaries
from scripts.reporting.figures import NO_FIGURE, budget, percent, source_lead, with_interval, with_quartiles
from scripts.reporting.headline import steps_path
from scripts.reporting.recall import HARD
from scripts.reporting.records import MissingRecord, json_record, label, steps_record
from scripts.reporting.rule import VERDICTS
from scripts.reporting.variants import equations, header, variants

INCLUDE = re.compile(r"(<!-- include (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
STARTS = {"results/starts.md": "at the source's size", "results/starts_small.md": "for small models"}
LEADERBOARD, NOVEL_LEADERBOARD = "results/leaderboard.md", "results/leaderboard_novel.md"
RECALL = "results/recall.md"
# Comparisons of MHA+, gMLP and AFT: {(claim, tier): (the comparison's name in the README, its page in results/)}.
COMPARISONS = {
    ("headline", "small"): ("Small models", "table.md"),
    ("headline", "novel"): ("One novel", "headline/novel.md"),
    ("updates", "novel"): ("The novel in smaller batches", "headline/novel_small_batches.md"),
    ("headline", "source"): ("A larger, mixed text", "headline/source.md"),
    ("ten_passes", "source"): ("More passes over it", "headline/source_ten_passes.md"),
    ("author_code", "novel"): ("The novel, settings of the author's public code", "claims/novel.md#author_code"),
}
STATED = ("gmlp", "aft")  # attentions whose perplexity and speed the source states beside MHA+'s
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


def cells(path: Path) -> list[list[str]]:
    """Return the rows of the first table of a page, the head first."""
    first = re.search(r"(^\|.*\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for line in first[0].splitlines() if set(line) - set("|-: ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def short_variants(_root: Path) -> str:
    """Return the names and labels of all attentions in one paragraph."""
    names = [f"{header(variant)['label']} (`{variant}`)" for variant in variants()]
    return f"{len(names)} attentions can be chosen: {'; '.join(names)}.\n"


def leaderboard(root: Path) -> str:
    """Return a section with the top of the leaderboard; nothing if there is no such page."""
    if not (root / LEADERBOARD).exists():
        return ""
    head, *rows = cells(root / LEADERBOARD)
    shown = [i for i, name in enumerate(head) if name not in LEFT_OUT]
    top = markdown.table([[row[i] for i in shown] for row in rows[:TOP]], [head[i] for i in shown])
    state = head.index("state, bytes")
    sizes = {row[0]: int(row[state].replace(",", "")) for row in rows[:TOP] if row[state] != NO_FIGURE}
    smallest = (
        f" Of those shown, {min(sizes, key=sizes.get)} keeps the smallest state when it writes text." if sizes else ""
    )
    recalled, page = "", root / RECALL
    found = re.search(rf"With {HARD}, .+\.$", page.read_text("utf-8"), re.MULTILINE) if page.exists() else None
    if found and "recall, %" in head:
        recalled = (
            f" Recall is the share of correct answers in [associative recall]({RECALL}) with {HARD}: the mean over "
            f"seeds and, in brackets, the lowest and the highest value of a seed. {found[0]}"
        )
    heldout = head.index("held-out")
    scored = [row for row in rows if row[heldout] != NO_FIGURE]
    general = sorted(scored, key=lambda row: float(row[heldout].split()[0]))[:3]
    lowest = "; ".join(row[0] for row in general) or "none"
    started = [label(path.stem) for path in sorted((CONFIGS / "starts/small").glob("*.yaml"))]
    note = (
        f"The table shows the {min(TOP, len(rows))} of {len(rows)} measured attentions that fit the training text "
        "best, each in a small model (`experiment=small`) at its best learning rate. The lowest mean held-out "
        f"perplexities are those of {lowest}. Starts were chosen only for "
        f"{'; '.join(started)}. A block of any GAU or of FLASH has two attention layers and no feed-forward. [The "
        f"leaderboard]({LEADERBOARD}) has all attentions, with leads and plots; some were also trained [at the source's"
        f" size]({NOVEL_LEADERBOARD}). Brackets after perplexities are 95% intervals over seeds; after speeds, "
        f"they are quartiles over rounds.{smallest}{recalled}"
    )
    return f"## The leaderboard\n\n{top}\n\n{note}\n"


def findings(root: Path) -> str:
    """Return a table of comparisons and a list of findings.

    The figures are read from the files in results/, except for some figures of the source, which are read from
    configs/compare.yaml.
    """
    return markdown.page(comparisons(root), markdown.notes(*best_starts(root), *speeds(root), *verdicts(root)))


def comparisons(root: Path) -> str:
    """Return a table with the leads over MHA+ in each comparison whose runs are finished; "" if there is none."""
    rows = [comparison(root, *claim, *named) for claim, named in COMPARISONS.items()]
    if not any(rows):
        return ""
    source = compose([], "compare").source
    stated = ["The source", "not stated", *(source_lead(source, row, "mha_plus").text for row in STATED), NO_FIGURE]
    heads = ["", "training", *(f"{label(row)}'s lead over MHA+" for row in STATED), "the source's order"]
    return markdown.page(
        "These are the leads over MHA+ on the training text, with plain 95% intervals. [The "
        "rule](results/CLAIMS.md#how-a-verdict-is-reached) that judges the source's order can make them wider, "
        "because this order rests on two comparisons. Where it is undecided, the order of the means may be chance. "
        "The source author's public code has no gMLP, and gives AFT a higher learning rate than MHA+.",
        markdown.table([stated, *filter(None, rows)], heads, left=(0, 1, 4)),
    ).strip()


def comparison(root: Path, name: str, tier: str, what: str, path: str) -> list[str] | None:
    """Return a line with the leads over MHA+ of a claim's rows, and its verdict; None if runs are missing."""
    claim, runs = all_claims()[name], root / "results/runs"
    try:
        losses = samples(claim, tier, root / "results")
        run = summaries(claim, "MHA+", tier, runs)[0]
    except MissingRecord:
        return None
    leads = [
        with_interval([a - b for a, b in zip(losses["MHA+"], losses[label(row)], strict=True)], percent).text
        for row in STATED
    ]
    verdict = linked(claim, tier, {(name, tier): losses}, "results/claims")
    return [f"[{what}](results/{path})", budget(run), *leads, verdict]


def best_starts(root: Path) -> Iterator[str]:
    """Yield a sentence with the perplexity of each plain start divided by that of the attention's best start."""
    plain = r"The plain start has (?:(\S+) times its perplexity|(diverged))\."
    best = rf"^## (.+)\n\nBest on the whole text after (\d+) steps: (.+?)\.(?: {plain})?$"
    found = []
    for path, whose in STARTS.items():
        text = (root / path).read_text("utf-8") if (root / path).exists() else ""
        if rows := re.findall(best, text, re.MULTILINE):
            costs = "; ".join(f"{name} {cost or failed or '1.00'} ({start})" for name, _, start, cost, failed in rows)
            found.append(f"{whose}, after {rows[0][1]} steps: {costs} ([all starts]({path}))")
    if found:
        yield (
            "Much depends on the start, which is the initialisation. From the plain start, in which f, alpha and beta "
            "are 1, the perplexity is this many times that from the best start, which is named in brackets (one seed "
            f"and one learning rate): {'; '.join(found)}. With a learning rate that is chosen for it, a plain start "
            "can be closer to the best one."
        )


def speeds(root: Path) -> Iterator[str]:
    """Yield a sentence with the ratios of speeds, each beside the source's."""
    source, ratios = compose([], "compare").source, speed_ratios(root)
    told = [
        f"{label(row)} {ratios[row]}, in the source {source[row].speed / source.mha_plus.speed:.2f}" for row in STATED
    ]
    yield (
        "The speeds of a training step at the source's size on a CPU, divided by MHA+'s, are (medians and quartiles): "
        f"{'; '.join(told)} "
        "([claim 2](results/claims/small.md#speed); more attentions [in bf16](results/benchmark/cpu/bf16/steps.md), "
        "timed separately and with ratios that differ from these, and [in "
        "float32](results/benchmark/cpu/float32/steps.md))."
    )


def speed_ratios(root: Path) -> dict[str, str]:
    """Return the speeds of gMLP and AFT over MHA+'s, from the timings of claim 2 and the benchmark's in float32."""
    claimed = benchmark_record(all_claims()["speed"], "small", root / "results")
    records = [claimed, steps_record(steps_path(root / "results", "float32"))]
    return {variant: " and ".join(speed_ratio(record, variant) for record in records) for variant in STATED}


def speed_ratio(record: dict, variant: str) -> str:
    """Return the speed of an attention over MHA+'s in a record of training steps.

    The returned text also states the record's precision and its number of rounds.
    """
    pairs = zip(record["seconds"]["mha_plus"], record["seconds"][variant], strict=True)
    ratios = [a / b for a, b in pairs]
    return f"{with_quartiles(ratios).text} in {record['provenance']['precision']} ({len(ratios)} rounds)"


def verdicts(root: Path) -> Iterator[str]:
    """Yield the numbers of verdicts on the small tier, and other claims with a verdict at the source's size, by tier.

    These other claims are those that `comparisons` does not show.
    """
    head, *rows = cells(root / "results/CLAIMS.md")
    for column in COLUMNS:
        found, tier = {verdict: [] for verdict in VERDICTS}, column.removesuffix(" tier")
        for row in rows:
            link = re.match(r"\[(\w+)\]\((\S+?#(\w+))\)( \(2 seeds\))?", row[head.index(column)])
            if link and (tier == "small" or (link[3], tier) not in COMPARISONS):
                found[link[1]].append(f"[{row[head.index('claim')]}](results/{link[2]}){link[4] or ''}")
        if tier == "small":
            counts = ", ".join(f"{len(claims)} are {verdict}" for verdict, claims in found.items() if claims)
            judged = sum(map(len, found.values()))
            yield f"**On the small tier**, of the {judged} judged claims, {counts}: [all claims](results/CLAIMS.md)."
        elif any(found.values()):
            listed = (f"{verdict.capitalize()}: {'; '.join(claims)}." for verdict, claims in found.items() if claims)
            yield f"**Other claims on the {tier} tier.** {' '.join(listed)}"


def peers(root: Path) -> str:
    """Return the table of our layers beside public ones, in float32 on the CPU."""
    return peers_table(json_record(root / "results/benchmark/cpu/float32/layers.json", COMMAND))


MADE: dict[str, Callable[[Path], str]] = {
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

"""Write the findings of the README: the source's comparison, the effect of the start, speeds and verdicts.

The figures are read from the files in results/, except for some figures of the source, which are read from
configs/compare.yaml.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from configs.cli import compose
from scripts.reporting import markdown
from scripts.reporting.claim_pages import linked
from scripts.reporting.claims import (
    TIERS,
    all_claims,
    all_costs,
    benchmark_record,
    heldout_differences,
    samples,
    summaries,
)
from scripts.reporting.figures import (
    NO_FIGURE,
    budget,
    leads,
    percent,
    perplexity,
    shown,
    source_lead,
    with_interval,
    with_quartiles,
)
from scripts.reporting.records import MissingRecord, label, steps_path, steps_record
from scripts.reporting.rule import REPRODUCED, VERDICTS

STARTS_NOVEL = "results/starts.md"
PLAIN_STARTS = "results/headline/novel_plain_start.md"
# Comparisons of MHA+, gMLP and AFT: {(claim, tier): (the comparison's name in the README, its page in results/)}.
COMPARISONS = {
    ("headline", "small"): ("Small models, from the starts in use", "table.md"),
    ("headline", "novel"): ("One novel", "headline/novel.md"),
    ("updates", "novel"): ("The novel in smaller batches", "headline/novel_small_batches.md"),
    ("headline", "source"): ("A larger, mixed text", "headline/source.md"),
    ("ten_passes", "source"): ("More passes over it", "headline/source_ten_passes.md"),
    ("author_code", "novel"): ("The novel, settings of the author's public code", "claims/novel.md#author_code"),
}
JUDGED = re.compile(r"\[(\w+)\]\((\S+?#(\w+))\)")  # in a cell of CLAIMS.md: verdict, link, name of the claim
STATED = ("gmlp", "aft")  # attentions whose perplexity and speed the source states beside MHA+'s


def rows_of(path: Path, heading: str = "") -> list[dict[str, str]]:
    """Return the rows of the first table of a page, or of its first table after a heading, as {column: cell}.

    The column of names is "". Returns [] if there is no such page or table.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    first = re.search(r"(^\|.*\n)+", text.partition(heading)[2] if heading else text, re.MULTILINE)
    lines = [line for line in first[0].splitlines() if set(line) - set("|-: ")] if first else []
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] or [[]]
    return [dict(zip(head, row, strict=True)) for row in rows]


def findings(root: Path) -> str:
    """Return a table of comparisons and a list of findings."""
    return markdown.page(comparisons(root), markdown.notes(*best_starts(root), *speeds(root), *verdicts(root)))


def comparisons(root: Path) -> str:
    """Return a table with the leads over MHA+ in each comparison whose runs are finished; "" if there is none."""
    rows = {claim: comparison(root, *claim, *named) for claim, named in COMPARISONS.items()}
    if not any(rows.values()):
        return ""
    novel, code = rows["headline", "novel"], rows["author_code", "novel"]
    better = novel and code and reference_heldout(code) < reference_heldout(novel)
    settings = (
        f" The settings of the author's public code are {'better' if better else 'not better'} there. They include "
        "another feed-forward and optimiser, and a higher learning rate for AFT than for MHA+; the code has no gMLP, "
        "whose row has MHA+'s settings where they apply."
        if novel and code
        else ""
    )
    source = compose([], "compare").source
    stated, heads = ["The source", "not stated", NO_FIGURE], ["", "training", "MHA+'s held-out perplexity"]
    for row in STATED:
        stated += [source_lead(source, row, "mha_plus").text, NO_FIGURE]
        heads += [f"{label(row)}'s lead", f"{label(row)}'s lead, held-out"]
    stated.append(NO_FIGURE)
    heads.append("the source's order")
    return markdown.page(
        "The table shows leads over MHA+ with plain 95% intervals: on the training text at the end of training, and on "
        "held-out text at each run's lowest perplexity. The source's order is judged on the training text, with "
        "intervals that can be wider, because it rests on two comparisons ([the "
        "rule](results/CLAIMS.md#how-a-verdict-is-reached)). Where it is undecided, the order of the means may be "
        "chance; the numbers of seeds that would decide it are estimates from the present figures. Learning rates and "
        f"starts were chosen on the training text: others can be better on held-out text.{settings} The held-out text "
        "of zh_mixed is shop reviews alone. The small models of this table have the starts that train.py uses, those "
        "of the leaderboard each attention's best start.",
        markdown.table([stated, *filter(None, rows.values())], heads, left=(0, 1, 7)),
    ).strip()


def reference_heldout(row: list[str]) -> float:
    """Return MHA+'s held-out perplexity in a row of the comparisons, without its deviation."""
    return float(row[2].split()[0])


def comparison(root: Path, name: str, tier: str, what: str, path: str) -> list[str] | None:
    """Return a claim's row of the table, with its leads over MHA+ and its verdict; None if runs are missing."""
    claim, runs = all_claims()[name], root / "results/runs"
    try:
        losses = samples(claim, tier, root / "results")
        reference, *others = (summaries(claim, row, tier, runs) for row in ("MHA+", *map(label, STATED)))
    except MissingRecord:
        return None
    ahead = [
        shown(with_interval(leads(group, reference, text), percent))
        for group in others
        for text in ("fit", "heldout_best")
    ]
    level = shown(perplexity(reference, "heldout_best"))
    verdict = linked(claim, tier, {(name, tier): losses}, "results/claims")
    return [f"[{what}](results/{path})", budget(reference[0]), level, *ahead, verdict]


def best_starts(root: Path) -> Iterator[str]:
    """Yield a sentence with the perplexity of each plain start divided by that of the attention's best start."""
    steps, costs = plain_starts(root)
    if costs:
        yield (
            f"Much depends on the start, which is the initialisation. After {steps} steps at the source's size, the "
            f"perplexity from the plain start was this many times that from [the best start tried]({STARTS_NOVEL}): "
            f"{'; '.join(f'{name} {cost}' for name, cost in costs)} (one seed and one learning rate).{plain_ends(root)}"
        )


def plain_ends(root: Path) -> str:
    """Return a space and a sentence on the figures at the end of training from plain starts; "" without their page."""
    rows = rows_of(root / PLAIN_STARTS)
    if not rows:
        return ""
    fits = (f"{row[''].replace(', starts=none', '')} {row['fit perplexity']}" for row in rows)
    seeds = re.search(r"^- .*?, (seeds? [\d, to]+);", (root / PLAIN_STARTS).read_text("utf-8"), re.MULTILINE)[1]
    return (
        f" At the end of training, at the best of the rates that were tried, [plain starts]({PLAIN_STARTS}) have these "
        f"fit perplexities ({seeds}): {'; '.join(fits)}. [Rates](results/rates.md) and [optimisers]"
        "(results/claims/small.md#optimizers) change the leads too."
    )


def plain_starts(root: Path) -> tuple[int, list[tuple[str, str]]]:
    """Return the steps on the page of starts and, for each attention, its name and what its plain start costs.

    The models have the source's size. The cost is the perplexity from the plain start divided by that from the best
    start, or "diverged".
    """
    path = root / STARTS_NOVEL
    text = path.read_text("utf-8") if path.exists() else ""
    plain = r"The plain start has (?:(\S+) times its perplexity|(diverged))\."
    best = rf"^## (.+)\n\nBest on the whole text after (\d+) steps: .+?\.(?: {plain})?$"
    rows = re.findall(best, text, re.MULTILINE)
    return int(rows[0][1]) if rows else 0, [(name, cost or failed or "1.00") for name, _, cost, failed in rows]


def speeds(root: Path) -> Iterator[str]:
    """Yield a sentence with the ratios of speeds, each beside the source's."""
    source, ratios = compose([], "compare").source, speed_ratios(root)
    told = [
        f"{label(row)} {ratios[row]}, in the source {source[row].speed / source.mha_plus.speed:.2f}" for row in STATED
    ]
    yield (
        "The speeds of a training step at the source's size on a CPU, divided by MHA+'s, are (medians and quartiles): "
        f"{'; '.join(told)} "
        "([claim 2](results/claims/small.md#speed); more attentions [in "
        "float32](results/benchmark/cpu/float32/steps.md) and [in bf16](results/benchmark/cpu/bf16/steps.md); those in "
        f"bf16 were timed separately, and their ratios differ from these).{speeds_on_a_gpu(root)}"
    )


def speeds_on_a_gpu(root: Path) -> str:
    """Return a space and a sentence with the ratios of speeds on a GPU; "" if they were not measured."""
    try:
        record = benchmark_record(all_claims()["speed"], "source", root / "results")
    except MissingRecord:
        return ""
    told = "; ".join(f"{label(row)} {speed_ratio(record, row)}" for row in STATED)
    steps = "results/benchmark/gpu/bf16/steps.md"
    return (
        f" On {record['provenance']['device']}: {told} ([claim 2](results/claims/source.md#speed); [more "
        f"attentions]({steps}), timed separately, also with Triton kernels)."
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
    reference, seconds = record["seconds"]["mha_plus"], record["seconds"][variant]
    precision = record["provenance"]["precision"]
    return f"{with_quartiles(reference, seconds).text} in {precision} ({len(seconds)} rounds)"


def devices(results: Path, tier: str) -> str:
    """Return ", with costs measured on" and the devices on which a tier's claims were timed; "" if none were."""
    names = [record["provenance"]["device"] for record in all_costs(tier, results).values()]
    return f", with costs measured on {markdown.each(names, ' and ')}" if names else ""


def verdicts(root: Path) -> Iterator[str]:
    """Yield a sentence that counts the verdicts on each tier, and one that qualifies some of the reproduced claims.

    It names those on fit for which `differs_on_heldout` is true, except those whose held-out text `comparisons` shows.
    """
    rows, counted, other_way = rows_of(root / "results/CLAIMS.md"), [], []
    for tier in TIERS:
        judged = [(row["claim"], link) for row in rows if (link := JUDGED.match(row[f"{tier} tier"]))]
        counts = Counter(link[1] for _, link in judged)
        if judged:
            told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
            counted.append(f"{len(judged)} claims on the {tier} tier{devices(root / 'results', tier)}: {told}")
        other_way += [
            f"[{claim}](results/{link[2]}) ({tier})"
            for claim, link in judged
            if link[1] == REPRODUCED and (link[3], tier) not in COMPARISONS and differs_on_heldout(root, link[3], tier)
        ]
    if counted:
        yield f"**Verdicts** ([all claims](results/CLAIMS.md)). {'; '.join(counted)}."
    if other_way:
        yield (
            "These reproduced claims are judged on the training text. On held-out text, the means of at least one of "
            f"their comparisons have the other order: {'; '.join(other_way)}."
        )


def differs_on_heldout(root: Path, name: str, tier: str) -> bool:
    """Return whether a comparison of a claim on fit has, on held-out text, means in the opposite of the expected order.

    Returns False if runs are missing.
    """
    try:
        differences = heldout_differences(all_claims()[name], tier, root / "results")
    except MissingRecord:
        return False
    return any(difference is not None and difference.value < 0 for difference in differences)

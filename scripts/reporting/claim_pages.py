"""What became of the sources' claims, from the records alone.

CLAIMS.md, claims/short.md, and for each claim and tier whose records are there claims/<tier>/<claim>.md with its plot.
"""

import math
import statistics
from pathlib import Path

from omegaconf import DictConfig
from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.claim_plots import draw
from scripts.reporting.claims import (
    PERPLEXITY,
    TIERS,
    TRAINED,
    USUAL_TIERS,
    Outcome,
    all_claims,
    benchmark_record,
    needed,
    outcomes,
    page,
    records_of,
    samples,
    summaries,
    tiers,
    verdict,
)
from scripts.reporting.plots import save
from scripts.reporting.records import NotThere, check_measured, commit, finished, logged, record_of
from scripts.reporting.rule import MOST_SEEDS, UNDECIDED, Comparison, Interval, interval
from training.record import Record

SEEDS = (0, 1, 2, 3, 4)  # of the runs that the search's candidate and AFT are compared by
RULE = (
    "Judged by version 2 of the rule ([rule.py]({root}/scripts/reporting/rule.py); [how often it errs]({root}/results/"
    "rule.md)). Rows are compared pair by pair, the same seed with the same seed or, where costs are timed, round with "
    "round, by the mean difference and its interval (Student's, after Holm's correction within a claim). `A < B` is "
    "reproduced where the interval is above 0 and the mean at least 0.5%, contradicted where that holds the other way "
    "round, equivalent where the interval is within ±1%, else undecided. `A <= B`, no worse, is reproduced where the "
    "interval is above -1% and contradicted where it is below. A claim has one verdict."
)
COLUMNS = [{"cpu": "CPU"}.get(tier, tier) + " tier" for tier in TIERS]
FIRST_TIER = "cpu"  # whose runs came before version 2 of the rule
CHANGED = (
    "Changed after the results: the runs of the CPU tier were made under version 1 of the rule, which tested at "
    "one-sided 95% without a correction, called undecided differences none, and counted how many expectations held, "
    "also where one is enough. Version 2 was written when they were known, and is applied to the same records. "
    "Version 1 is in the history of claims.py."
)


def write(results: Path) -> None:
    """Write the pages of all claims whose records are there."""
    pages = {}
    for name, claim in all_claims().items():
        for tier in tiers(claim):
            try:
                measured = samples(name, tier, results)
                figure = draw(name, tier, measured, results)
            except NotThere:
                continue
            if all_claims()[name].measure in PERPLEXITY:
                check_compared(name, tier, results / "runs")
            pages[name, tier] = measured
            path = page(name, tier, results)
            write_bytes(path.with_suffix(".md"), details(name, tier, measured, results).encode())
            save(figure, path.parent, name, dpi=110)
    write_bytes(results / "CLAIMS.md", overview(pages).encode())
    write_bytes(results / "claims/short.md", in_short(pages).encode())
    write_bytes(results / "claims/gated_mean.md", candidate(results).encode())


def check_compared(name: str, tier: str, runs: Path) -> None:
    """Raise UserError where the rows of a claim were not evaluated on the same characters."""
    claim = all_claims()[name]
    check_measured([s for row in claim.rows for s in summaries(claim, row, tier, runs)], claim.measure)


def overview(pages: dict[tuple[str, str], dict]) -> str:
    """The table of all claims."""
    rows = []
    for name, claim in all_claims().items():
        tier = next((t for t in reversed(TIERS) if (name, t) in pages), None)
        ours = f"{'; '.join(figures(claim, pages[name, tier]))} ({tier})" if tier else "–"
        verdicts = [linked(name, t, pages, "claims") for t in TIERS]
        at = "" if tiers(claim) == USUAL_TIERS else f" tier={tiers(claim)[0]}"
        command = f"`python -m scripts.reproduce claims=[{name}]{at}`"
        rows.append([str(claim.number), claim.source, claim.says, claim.figure, ours, *verdicts, command])
    heads = ["#", "source", "claim", "source's figure", "ours", *COLUMNS, "command"]
    return "\n".join(
        [
            "# The sources' claims",
            "",
            tabulate(rows, heads, "github", disable_numparse=True),
            "",
            f"- {RULE.format(root='..')}",
            f"- {CHANGED} What else was changed stands on the claim's page.",
            "- The CPU tier is the source's architecture made small (configs/experiment/cpu.yaml): what it says, it "
            "says of small models that saw little text. The novel tier is the source's size, ten times over one novel "
            "(configs/experiment/novel.yaml), for the claims that name it. The full tier is the source's size; its "
            "10,000 steps are this repository's choice, as the source states none.",
            "- `python -m scripts.report` writes this page, the claims' pages and their plots from the records.",
            "",
        ]
    )


def in_short(pages: dict[tuple[str, str], dict]) -> str:
    """A line for each claim, for the README."""
    rows = [
        [str(claim.number), claim.says, *(linked(name, tier, pages, "results/claims") for tier in TIERS)]
        for name, claim in all_claims().items()
    ]
    return tabulate(rows, ["#", "claim", *COLUMNS], "github", disable_numparse=True) + "\n"


def candidate(results: Path) -> str:
    """What the records say of the gated mean, which the search found, against AFT: a line for each setting and text."""
    rows = []
    for experiment, row in (("cpu", "rwv attn.R=gelu attn.W=sigmoid_k"), ("small", "gated_mean")):
        records = {
            seed: [record_of(results / "runs", experiment, name, seed) for name in (row, "aft")] for seed in SEEDS
        }
        pairs = {seed: [finished(record) for record in pair] for seed, pair in records.items()}
        pairs = {seed: pair for seed, pair in pairs.items() if None not in pair}
        if len(pairs) < 2:
            continue
        for text, words in (("fit", "training text"), ("heldout", "held-out text")):
            ours, aft = ([s["evaluation"][text] for s in side] for side in zip(*pairs.values(), strict=True))
            leads = [b["loss"] - a["loss"] for a, b in zip(ours, aft, strict=True)]
            mean = statistics.mean(leads)
            low, high, _ = interval(Comparison("<", mean, statistics.stdev(leads), len(leads)), 0.95)
            setting = f"{experiment}, {next(iter(pairs.values()))[0]['steps']:,} steps"
            means = [spread([one["perplexity"] for one in side], 2) for side in (ours, aft)]
            lead = f"{100 * mean:+.2f}% ({100 * low:+.2f}% to {100 * high:+.2f}%)"
            rows.append([setting, words, *means, lead, ", ".join(map(str, pairs))])
    heads = ["experiment", "perplexity on", "gated mean", "AFT", "its lead over AFT, with its 95% interval", "seeds"]
    return tabulate(rows, heads, "github", colalign=["left", "left", *["right"] * 4], disable_numparse=True) + "\n"


def linked(name: str, tier: str, pages: dict[tuple[str, str], dict], folder: str) -> str:
    """The verdict on a claim, with its page."""
    claim = all_claims()[name]
    if tier not in tiers(claim):
        return "–"
    if (name, tier) not in pages:
        return "not run"
    found = outcomes(claim, pages[name, tier])
    return f"[{verdict(claim, found)}]({folder}/{tier}/{name}.md){would_decide(claim, found)}"


def would_decide(claim: DictConfig, found: list[Outcome]) -> str:
    """What an undecided claim lacks, to be put behind its verdict."""
    if verdict(claim, found) != UNDECIDED:
        return ""
    what, n, number = "seed" if claim.measure in TRAINED else "round", found[0].comparison.n, needed(claim, found)
    if n == 1:
        return f" (1 {what}, which decides nothing)"
    return f" ({n} {what}s; {f'about {number}' if number else f'more than {MOST_SEEDS}'} would decide)"


def figures(claim: DictConfig, measured: dict[str, list[float]]) -> list[str]:
    """What was measured of each row that the claim speaks of: mean and standard deviation, in words."""
    spoken = " ".join(str(operand) for a, _, b in claim.expects for operand in (a, b))
    return [f"{key} {figure(claim, key, values)}" for key, values in measured.items() if key in spoken]


def figure(claim: DictConfig, key: str, values: list[float]) -> str:
    if claim.measure in ("position_weight", "longest"):
        return spread(values, 3)
    linear = [math.exp(value) for value in values]
    if claim.measure in PERPLEXITY:
        return spread(linear, 2)
    if key.endswith("growth"):
        return f"{spread(linear, 2)} x"
    if key.endswith("memory"):
        return f"{spread([byte / 2**20 for byte in linear], 0)} MiB"
    return f"{spread(linear, 3)} s"


def spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):,.{digits}f}"
    alone = len(set(values)) == 1 or not all(map(math.isfinite, values))
    return mean if alone else f"{mean} ± {statistics.stdev(values):,.{digits}f}"


def details(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> str:
    """The page of one claim."""
    claim = all_claims()[name]
    found = outcomes(claim, measured)
    heads = ["expected", "mean of right minus left", "interval", "level", "verdict"]
    expected = [[o.text, f"{o.comparison.mean:+.2%}", *within(o.interval), o.verdict] for o in found]
    table = trained_rows if claim.measure in TRAINED else timed_rows
    rows, notes = table(name, tier, measured, results)
    return "\n".join(
        [
            f"# Claim {claim.number}: {claim.says}",
            "",
            f"Source {claim.source}: {claim.figure}. {tier} tier: "
            f"**{verdict(claim, found)}**{would_decide(claim, found)}.",
            "",
            *([claim.note, ""] if "note" in claim else []),
            f"![{claim.says}]({name}.png)",
            "",
            rows,
            "",
            tabulate(expected, heads, "github", disable_numparse=True),
            "",
            *(f"- {note}" for note in (*notes, *judged(claim, tier))),
            "",
        ]
    )


def within(interval: Interval) -> tuple[str, str]:
    """An interval and its level, as they are printed."""
    known = f"{interval.low:+.2%} to {interval.high:+.2%}" if math.isfinite(interval.low) else "–"
    return known, f"{100 * interval.level:.4g}%"


def judged(claim: DictConfig, tier: str) -> list[str]:
    """By which rule a page is judged, and what was changed when results were known."""
    rule = RULE.format(root="../../..")
    if claim.get("exists"):
        rule += " This one is reproduced where all that is expected of one row is."
    changed = [CHANGED] if tier == FIRST_TIER else []
    if "changed" in claim:
        changed.append(f"Also changed after results: {claim.changed}.")
    return [rule, *changed]


def trained_rows(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[str, list[str]]:
    """A table of the runs, and what they come from."""
    claim = all_claims()[name]
    found = {row: summaries(claim, row, tier, results / "runs") for row in claim.rows}
    rows = []
    for row, group in found.items():
        perplexities = [column(group, t, "perplexity", 2) for t in (*PERPLEXITY, "heldout_best")]
        perplexities += [column(group, t, "bits_per_byte", 3) for t in PERPLEXITY]
        seconds = f"{statistics.mean(s['training_seconds'] for s in group):,.0f}"
        rows.append([row, *perplexities, f"{group[0]['parameters']:,}", seconds, f"`{group[0]['command']}`"])
    heads = ["", "fit perplexity", "held-out", "best held-out", "fit bits per byte", "held-out bits per byte"]
    heads += ["parameters", "seconds", "command of the first seed"]
    runs = [s for group in found.values() for s in group]
    first = runs[0]
    steps, tokens = ([f"{s[key]:,}" for s in runs] for key in ("steps", "tokens"))
    notes = [
        f"Seeds {', '.join(str(s['seed']) for s in found[next(iter(found))])}; mean ± standard deviation. "
        f"{distinct(steps)} steps, {distinct(tokens)} characters. Seconds: runs side by side, no benchmark.",
        f"Corpus {first['data']['name']}: vocabulary {first['data']['vocabulary']:,}, "
        f"sha256 {first['data']['sha256'][:12]}.",
        f"{', '.join(dict.fromkeys(s['device'] for s in runs))}, {first['precision']}, torch "
        f"{first['versions']['torch']}; commit {', '.join(dict.fromkeys(commit(s) for s in runs))}.",
    ]
    if claim.plot == "curves":
        notes.insert(0, settled({row: records_of(results / "runs", claim, row, tier) for row in claim.rows}))
    if claim.measure not in PERPLEXITY:
        notes.insert(0, f"Compared: {'; '.join(figures(claim, measured))}.")
    return tabulate(rows, heads, "github", colalign=["left", *["right"] * 7, "left"], disable_numparse=True), notes


def column(group: list[dict], text: str, key: str, digits: int) -> str:
    """A figure of a text in the evaluations of a row's runs, mean and standard deviation; a dash where one lacks it."""
    values = [summary["evaluation"].get(text, {}).get(key) for summary in group]
    return "–" if None in values else spread(values, digits)


def settled(records: dict[str, list[Record]]) -> str:
    """Since when the rows have stood in the order in which they end, by the mean fit loss of their seeds."""
    characters, values = logged([record for of_seeds in records.values() for record in of_seeds], "fit_loss")
    left = iter(values)
    losses = {
        row: [statistics.mean(at) for at in zip(*(next(left) for _ in of_seeds), strict=True)]
        for row, of_seeds in records.items()
    }
    orders = [sorted(losses, key=lambda row: losses[row][i]) for i in range(len(characters))]
    since = max((i + 1 for i, order in enumerate(orders) if order != orders[-1]), default=0)
    return f"{', '.join(orders[-1])}: in this order since {characters[since]:,} of {characters[-1]:,} characters."


def distinct(figures: list[str]) -> str:
    """The figure that all runs share, or the figures in the order of the rows."""
    return ", ".join(dict.fromkeys(figures))


def timed_rows(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[str, list[str]]:
    """A table of what was timed, and on what."""
    claim = all_claims()[name]
    record = benchmark_record(name, tier, results)
    origin = record["provenance"]
    rows = [[key, figure(claim, key, values)] for key, values in measured.items()]
    notes = [
        f"{len(next(iter(measured.values())))} rounds in turn; mean ± standard deviation; compiling left out.",
        f"{origin['device']}, {origin['threads'] or 'no'} threads, {origin['precision']}, torch "
        f"{origin['versions']['torch']}; commit {commit(origin)}; `{origin['command']}`.",
    ]
    if claim.measure == "layers":
        lengths = ", ".join(f"{int(T):,}" for T in record["lengths"])
        notes.insert(0, f"One layer, forward and backward, {origin['tokens']:,} characters at lengths {lengths}.")
    return tabulate(rows, ["", "measured"], "github", colalign=["left", "right"], disable_numparse=True), notes

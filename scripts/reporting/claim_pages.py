"""Write the pages on the sources' claims from their records.

CLAIMS.md lists all claims. claims/<tier>.md has a section for each claim that has records at this tier. Its plot, if it
has one, is claims/<tier>/<claim>.png or, if a page in headline/ shows the same runs, that page's plot.
"""

import math
import statistics
from functools import cache
from operator import itemgetter
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting import claims, markdown, row_rates
from scripts.reporting.benchmark_pages import launches
from scripts.reporting.claim_plots import QUANTITIES, draw, title_of
from scripts.reporting.figures import NO_FIGURE, best_heldout, seeds_in_words, shown
from scripts.reporting.plots import save
from scripts.reporting.rates import USUAL, rate_file
from scripts.reporting.records import MissingRecord, check_evaluated, composed, curves_by_row
from scripts.reporting.rule import MOST_SEEDS, UNDECIDED, Interval, seeds_to_decide
from training.record import Record

RULE = markdown.page(
    "## How a verdict is reached",
    "A claim has rows, which are models or layers. It compares the figures of one row with those of another, in pairs "
    "from runs with the same seed or, for costs, from timings in the same round; or it compares the figures of one "
    "row with a fixed number or, in claim 5, with other figures of the row. The difference between A and B is the "
    "logarithm of B's figure minus that of A's or, in claims 5 and 13, B's figure minus A's; 1% stands for 0.01. In "
    "one comparison of claim 9, A and B are each the difference of the log perplexities of two rows, and their "
    "difference is B minus A. The difference is judged by its mean and Student's interval, whose level is 95% or, by "
    "Holm's correction within a claim, higher:",
    markdown.table(
        [
            [
                "`A < B`: A's figure is lower",
                "above 0, and the mean is at least 0.5%",
                "below 0, and the mean is at most -0.5%",
            ],
            ["`A <= B`: A's figure is no higher", "above -1%", "below -1%"],
        ],
        ["expected", "reproduced if the interval is", "contradicted if the interval is"],
        left=range(3),
    ),
    "If neither holds, `A < B` is equivalent if the interval is within ±1%, and else undecided; `A <= B` is undecided.",
    markdown.notes(
        "If the verdicts on a claim's comparisons differ, the claim has the first of them in the order contradicted, "
        "undecided, equivalent, reproduced.",
        "For some claims it is enough that one row fulfils them; their sections say so. There, each row gets a verdict "
        "from its own comparisons by the order above. Of the rows' verdicts, the claim has the first in the order "
        "reproduced, undecided, equivalent, contradicted.",
        "The number of seeds or rounds that would decide an undecided claim, and the verdict that they would give, are "
        "calculated from the present means and deviations. Even if these are the true ones, new measurements scatter "
        "around them, and a claim may stay undecided with that many: in a simulation of one comparison, a quarter to a "
        "half of the time.",
        "Peak memory is measured once and judged as if it were exact.",
        "This is version 2 of the rule ([rule.py](../scripts/reporting/rule.py)). [A simulation](rule.md) shows how "
        "often it errs if the number of seeds is fixed in advance.",
    ),
).rstrip()
HOW = (
    "Figures are means ± standard deviations over seeds or rounds. Best held-out is the lowest held-out perplexity "
    "during training, on a few windows; as the lowest of many, it tends to be a little too low. `mean of right minus "
    "left` is the logarithm of the figure (in claims 5 and 13, the figure itself) of the right row in `expected` minus "
    "that of the left row, the mean over seeds or rounds; 1% stands for 0.01. `the same on held-out text` compares the "
    "logarithms of best held-out in this way, with a plain 95% interval; no verdict rests on it. The seconds of runs "
    "are no benchmark, because several runs were trained at the same time. Learning rates are those of configs/rates, "
    "whose files say how each was chosen for its attention, by perplexity on the training text. Beside a "
    "learning rate, `best of` names the rates that were tried with the row's settings ([perplexities](../rates.md)); "
    "`set by the row` means that the claim sets it; `chosen for the attention with other settings` means that it was "
    "chosen without the settings that this row changes; `not tuned` means that no rate was chosen. " + markdown.COMMANDS
)
STARTS = (  # keys that a start can change
    "attn.position_weight.initial_f",
    "attn.position_weight.positive",
    "attn.initial_head_mix",
    "attn.head_mix_scale",
    "attn.initial_scale",
    "model.init_std",
    "model.output_scale",
)


def write(results: Path) -> None:
    """Write the pages of all claims that have records.

    Raises UserError if runs of a claim on perplexity were evaluated on different characters.
    """
    pages, sections = {}, {}
    for name, claim in claims.all_claims().items():
        for tier in claims.tiers(claim):
            try:
                measured = claims.samples(claim, tier, results)
                own = is_drawn(claim, tier) and picture(claim, tier, results).parent.name == tier
                figure = draw(claim, tier, measured, results) if own else None
            except MissingRecord:
                continue
            for expected in claim.expects if claim.measure in claims.PERPLEXITY else ():
                rows = [row for row in claim.rows if row in names_in(expected)]
                runs = [s for row in rows for s in claims.summaries(claim, row, tier, results / "runs")]
                check_evaluated(runs, claim.measure)
            pages[name, tier] = measured
            sections.setdefault(tier, {})[name] = section(claim, tier, measured, results)
            if figure:
                save(figure, results / "claims" / tier, name, dpi=110)
    for tier, texts in sections.items():
        write_bytes(results / f"claims/{tier}.md", tier_page(tier, texts, pages).encode())
    write_bytes(results / "CLAIMS.md", overview(pages).encode())


def overview(pages: dict[tuple[str, str], dict]) -> str:
    """Return CLAIMS.md: a table of all claims with verdicts and figures, notes, and the rule of the verdicts."""
    rows = []
    for name, claim in claims.all_claims().items():
        tier = next((t for t in reversed(claims.TIERS) if (name, t) in pages), None)
        text = "held-out: " * (claim.measure == "heldout")
        ours = f"{text}{'; '.join(figures(claim, pages[name, tier]))} ({tier})" if tier else NO_FIGURE
        verdicts = [linked(claim, t, pages, "claims") for t in claims.TIERS]
        rows.append([str(claim.number), claim.says, *verdicts, claim.article_reports, ours, claim.article])
    heads = ["#", "claim", *(f"{tier} tier" for tier in claims.TIERS), "the article's figure", "our figures", "article"]
    return markdown.page(
        "# The sources' claims",
        markdown.table(rows, heads, left=range(len(heads))),
        markdown.notes(
            "Each verdict links to the section on the claim, which has commands and often a plot, and says what was "
            "changed after its results were known. A dash says that a tier does not test the claim, and `not run` "
            "that it does, but that runs are missing or have diverged. At the source tier the missing ones would take "
            "two CPU cores days. Our figures are those of each row that the claim compares, at the tier in brackets.",
            "Perplexities are those on the training text, unless they are marked as held-out. Claims with the same "
            "number are parts of one claim. The articles A to E are those of [CITATION.cff](../CITATION.cff).",
            "Growth is the seconds or the memory at the longest length divided by those at the shortest. At the "
            "longest length the same number of characters is processed in fewer texts, so that the growth is 1 if the "
            "cost of a text is linear in its length. Claim 13 shows by how many nats the held-out loss at longer "
            "lengths is above that at the trained length. The sections on claim 5 explain its figures.",
            "The tiers are the experiments of these names in configs/experiment. The small tier is the source's "
            "architecture at 128 dim, trained for 2.7 passes over one novel unless a claim sets another number of "
            "steps. The novel tier is the source's size, trained for ten passes over one novel; it tests claims "
            "that have a large effect at the small tier or may depend on the size, and none about depth, lengths of "
            "texts and sizes of keys. The source tier is the source's size, trained for three passes, "
            "or for ten in one claim, over zh_mixed, of which one half are shop reviews, and the rest a newspaper and "
            "this novel; the source's text consists of other novels. The source states no number of passes: these "
            "are the choice of this repository. In every tier an attention has the start and the learning rate that "
            "were chosen for it, if any, unless the claim sets others. A row that changes a setting of an attention "
            "keeps the attention's rate, unless the claim gives it one. At the small tier, "
            "[rates.md](rates.md#small-rows-of-claims) shows which rates were tried with such rows. Elsewhere, and "
            "after twice the steps, most rows were not tuned, and their own best rates may differ. At the small "
            "tier, the starts in use were chosen with one seed, among fewer starts than have been tried since: "
            "[starts_small.md](starts_small.md) has better ones for many attentions, and the "
            "[leaderboard](leaderboard.md#from-the-best-starts) compares attentions from their best starts. Speeds "
            "and memory are measured at the source's size in every tier, on the device that a claim's section names. "
            "The small tier tests the most claims and decides most; the others are nearer to the source, and what "
            "holds at the small tier need not hold at their size.",
            "Article A also says that its sampling rule, which drops characters whose probability is below 0.02 p^2, "
            "where p is the highest, writes texts that read better than those of top-p and top-k. Nothing here "
            "measures how well a text reads, so that this has no verdict: [samples.md](samples.md) shows texts of each "
            "sampler.",
            "`python -m scripts.report` writes this page, the pages of the tiers and their plots from the records.",
        ),
        RULE,
    )


def linked(claim: DictConfig, tier: str, pages: dict[tuple[str, str], dict], folder: str) -> str:
    """Return the verdict on a claim with a link to its section.

    Returns "not run" if its runs are missing or have diverged, and a dash if the tier does not test it.
    """
    if tier not in claims.tiers(claim):
        return NO_FIGURE
    if (claim.name, tier) not in pages:
        return "not run"
    measured = pages[claim.name, tier]
    verdict = claims.verdict(claim, claims.outcomes(claim, measured))
    return f"[{verdict}]({folder}/{tier}.md#{claim.name}){beside_the_verdict(claim, tier, measured)}"


def beside_the_verdict(claim: DictConfig, tier: str, measured: dict[str, list[float]]) -> str:
    """Return what follows the verdict on a claim, in brackets; "" if nothing does.

    For an undecided claim, that is the number of its seeds or rounds and, if there are several, how many would decide
    it. For a decided claim, it is the number of its seeds or rounds if there are only two. In both cases each seed
    follows without which the claim would have another verdict that is not undecided, together with this verdict.
    """
    judged = claims.outcomes(claim, measured)
    unit, n = unit_of(claim), judged[0].comparison.n
    without = [f"without seed {s}: {other}" for s, other in claims.without_one_seed(claim, tier, measured).items()]
    if claims.verdict(claim, judged) != UNDECIDED:
        parts = [*([f"{n} {unit}s"] * (n == 2)), *without]
        return f" ({'; '.join(parts)})" if parts else ""
    if n == 1:
        return f" (1 {unit}, which decides nothing)"
    return f" ({'; '.join([f'{n} {unit}s', would_decide(claims.seeds_needed(claim, judged), n), *without])})"


def unit_of(claim: DictConfig) -> str:
    return "seed" if claim.measure in claims.TRAINED else "round"


def would_decide(decided: tuple[int, str] | None, n: int) -> str:
    """Return how many seeds or rounds would decide, and with which verdict; there are `n`."""
    if decided is None:
        return f"more than {max(MOST_SEEDS, n)} would decide"
    return "about {} would give the verdict {}".format(*decided)


def verdict_on_each(claim: DictConfig, judged: list[claims.Outcome]) -> list[str]:
    """Return the verdict on each comparison of a claim. An undecided one says how many seeds or rounds would decide."""
    told, comparisons = [], [outcome.comparison for outcome in judged]
    for i, outcome in enumerate(judged):
        more = ""
        if outcome.verdict == UNDECIDED and outcome.comparison.n > 1:
            decided = seeds_to_decide(comparisons, itemgetter(i))
            more = f" ({outcome.comparison.n} {unit_of(claim)}s; {would_decide(decided, outcome.comparison.n)})"
        told.append(outcome.verdict + more)
    return told


def figures(claim: DictConfig, measured: dict[str, list[float]]) -> list[str]:
    """Return the name and the figure of each row that the claim compares.

    In claim 5 a row has several figures. Those that the claim compares in some row are returned for every row.
    """
    names = set().union(*map(names_in, claim.expects))
    if claim.measure == "position_weight":
        kinds = {name.removeprefix(row) for name in names for row in claim.rows if name.startswith(f"{row}, ")}
        names = {f"{row}{kind}" for row in claim.rows for kind in kinds}
    return [f"{key}: {figure(claim, key, values)}" for key, values in measured.items() if key in names]


def names_in(expected: list) -> set[str]:
    """Return the operands of a comparison and, for a difference "A - B", its parts."""
    return {name for operand in (expected[0], expected[2]) for name in (str(operand), *str(operand).split(" - "))}


def figure(claim: DictConfig, key: str, values: list[float]) -> str:
    """Return the mean and standard deviation of a row's measurements, in the unit that pages show."""
    if claim.measure in ("position_weight", "longer"):
        return spread(values, 3)
    linear = [math.exp(value) for value in values]
    if claim.measure in claims.PERPLEXITY:
        return spread(linear, 2)
    if key.endswith("growth"):
        return f"{spread(linear, 2)} x"
    if key.endswith("memory"):
        return f"{spread([byte / 2**20 for byte in linear], 0)} MiB"
    return f"{spread(linear, 3)} s" if statistics.mean(linear) > 0.1 else f"{spread([1e3 * s for s in linear], 1)} ms"


def spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):,.{digits}f}"
    alone = len(set(values)) == 1 or not all(map(math.isfinite, values))
    return mean if alone else f"{mean} ± {statistics.stdev(values):,.{digits}f}"


def tier_page(tier: str, sections: dict[str, str], pages: dict[tuple[str, str], dict]) -> str:
    """Return the page of a tier: a list of its claims that have records, and a section for each of them."""
    known = [claims.all_claims()[name] for name in sections]
    listed = [f"Claim {claim.number}, {linked(claim, tier, pages, '.')}: {claim.says}" for claim in known]
    return markdown.page(
        f"# The sources' claims at the {tier} tier",
        "[CLAIMS.md](../CLAIMS.md) lists the claims of all tiers, and says [how a verdict is "
        "reached](../CLAIMS.md#how-a-verdict-is-reached).",
        markdown.notes(*listed),
        HOW,
        *sections.values(),
    )


def is_drawn(claim: DictConfig, tier: str) -> bool:
    """Return whether a claim has a plot at a tier. Costs are drawn at the first tier alone."""
    return "plot" in claim and (claim.measure in claims.TRAINED or tier == claims.tiers(claim)[0])


def picture(claim: DictConfig, tier: str, results: Path) -> PurePath:
    """Return the path of a claim's plot, relative to claims/: that of its page in headline/ if there is one."""
    page = pages_in_headline().get((claim.name, tier))
    if page and (results / f"headline/{page}.png").exists():
        return PurePath(f"../headline/{page}.png")
    return PurePath(f"{tier}/{claim.name}.png")


@cache
def pages_in_headline() -> dict[tuple[str, str], str]:
    """Return {(claim, tier): name of the page in headline/ that shows the same runs}."""
    return {(entry.claim, entry.setup): entry.name for entry in compose([], "report").headline if entry.claim}


def section(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> str:
    """Return the section on one claim. Its anchor is the claim's name."""
    judged = claims.outcomes(claim, measured)
    compared = f" The rows are compared by {QUANTITIES[claim.measure]}." if claim.measure in claims.PERPLEXITY else ""
    heads = ["expected", "mean of right minus left", "interval", "level", "verdict"]
    expected = [
        [o.text, f"{o.comparison.mean:+.2%}", *interval_cells(o.interval), verdict]
        for o, verdict in zip(judged, verdict_on_each(claim, judged), strict=True)
    ]
    if claim.measure == "fit":
        heads.insert(4, "the same on held-out text")
        for cells, difference in zip(expected, claims.heldout_differences(claim, tier, results), strict=True):
            cells.insert(4, shown(difference))
    table, notes = (trained_rows if claim.measure in claims.TRAINED else timed_rows)(claim, tier, measured, results)
    return markdown.page(
        f"## <a id='{claim.name}'></a>Claim {claim.number}: {claim.says}",
        f"Article {claim.article}: {claim.article_reports}. Here: **{claims.verdict(claim, judged)}**"
        f"{beside_the_verdict(claim, tier, measured)}.{compared}",
        claim.get("note", "").rstrip(),
        f"This command repeats it: `python -m scripts.reproduce claims=[{claim.name}] tier={tier}`",
        f"![{title_of(claim, judged)}]({picture(claim, tier, results)})" if is_drawn(claim, tier) else "",
        table,
        markdown.table(expected, heads, left=(0, -1)),
        markdown.notes(*notes, *rule_notes(claim)),
    ).rstrip()


def interval_cells(interval: Interval) -> tuple[str, str]:
    """Return an interval and its level as text. Peak memory has no interval, because it is measured once."""
    if interval.low == interval.high:
        return "measured once", NO_FIGURE
    bounds = f"{interval.low:+.2%} to {interval.high:+.2%}" if math.isfinite(interval.low) else NO_FIGURE
    return bounds, f"{100 * interval.level:.4g}%"


def rule_notes(claim: DictConfig) -> list[str]:
    """Return how a claim's rule differs from that of the others, and what was changed after its results were known."""
    one_row = (
        "It is enough for this claim that one row fulfils it. Each row gets a verdict from its own comparisons. The "
        "claim has the first of these verdicts that some row has: reproduced, undecided, equivalent, contradicted."
    )
    changed = [f"Changed after results were known: {claim.changed}."] if "changed" in claim else []
    return [one_row, *changed] if claim.get("exists") else changed


def trained_rows(
    claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path
) -> tuple[str, list[str]]:
    """Return a table of a claim's runs, and sentences on where they come from."""
    groups = {row: claims.summaries(claim, row, tier, results / "runs") for row in claim.rows}
    rows = []
    for row, group in groups.items():
        perplexities = [*(column(group, text, "perplexity", 2) for text in claims.PERPLEXITY), best_heldout(group)]
        perplexities += [column(group, text, "bits_per_byte", 3) for text in claims.PERPLEXITY]
        seconds = f"{statistics.mean(s['training_seconds'] for s in group):,.0f}"
        rate, start = rate_and_start(claim, row, tier, results / "runs")
        rows.append(
            [row, *perplexities, f"{group[0]['parameters']:,}", seconds, rate, start, f"`{group[0]['command']}`"]
        )
    heads = ["", "fit perplexity", "held-out", "best held-out", "fit bits per byte", "held-out bits per byte"]
    heads += ["parameters", "seconds", "learning rate", "start", "command of the first seed"]
    runs = [summary for group in groups.values() for summary in group]
    steps, tokens = (markdown.each((f"{s[key]:,}" for s in runs), " or ") for key in ("steps", "tokens"))
    seeds = markdown.each(str(s["seed"]) for s in runs)
    notes = [
        f"Seeds {seeds}; {steps} steps, {tokens} characters.",
        f"Corpus {runs[0]['data']['name']}: {markdown.vocabulary(runs[0])}.",
        f"{markdown.trained_on(runs)}.{devices_by_row(groups)}",
    ]
    if claim.get("plot") == "curves":
        notes.insert(0, final_order({row: claims.records_of(results / "runs", claim, row, tier) for row in claim.rows}))
    if claim.measure not in claims.PERPLEXITY:
        notes.insert(0, f"Compared: {'; '.join(figures(claim, measured))}.")
    return markdown.table(rows, heads, left=(0, -1)), notes


def devices_by_row(groups: dict[str, list[dict]]) -> str:
    """Return a sentence on the device and precision of each row's runs, with the seeds if they differ within a row.

    Returns "" if the runs of each seed have the same device and precision, so that all compared pairs are alike.
    """
    by_row = {}
    for row, group in groups.items():
        used: dict[str, list[int]] = {}
        for summary in group:
            used.setdefault(f"{summary['device']} in {summary['precision']}", []).append(summary["seed"])
        named = (f"{place} ({seeds_in_words(seeds)})" for place, seeds in used.items())
        by_row[row] = " and ".join(used if len(used) == 1 else named)
    if len(set(by_row.values())) == 1:
        return ""
    both = len({summary["precision"] for group in groups.values() for summary in group}) > 1
    return (
        f" Devices and precisions by row: {'; '.join(f'{row}: {places}' for row, places in by_row.items())}."
        f"{' [precision.md](../precision.md) compares the two precisions.' * both}"
    )


def rate_and_start(claim: DictConfig, row: str, tier: str, runs: Path) -> tuple[str, str]:
    """Return a row's learning rate and what differs from the plain start.

    The rate is followed by the rates that were tried with the row's settings, if several were. Otherwise, it is
    followed by a note if the row sets it, if no rate was chosen, or if the row has other settings than the runs with
    which the rate was chosen.
    """
    words = claims.overrides(claim, row, tier)
    cfg = composed(words)
    optimizer = next((word.partition("=")[2] for word in words if word.startswith("optim=")), USUAL)
    chosen = rate_file(tier, optimizer, cfg.job.attn)
    changes = row_rates.changes_settings(words)
    rates = row_rates.tried(runs, words) if changes else {}
    if len(rates) > 1:
        how = f", {row_rates.in_words(rates, cfg.optim.lr)}"
    elif any(word.startswith("optim.lr=") for word in words):
        how = ", set by the row"
    elif not chosen.exists():
        how = ", not tuned"
    else:
        how = ", chosen for the attention with other settings" if changes else ""
    plain = composed((f"experiment={tier}", f"attn={cfg.job.attn}", "starts=none"))
    starts = {key: (OmegaConf.select(cfg, key), OmegaConf.select(plain, key)) for key in STARTS}
    given = [f"{key.split('.')[-1]}={ours}" for key, (ours, usual) in starts.items() if ours != usual]
    return f"{cfg.optim.lr:g}{how}", ", ".join(given) or "plain"


def column(group: list[dict], text: str, key: str, digits: int) -> str:
    """Return the mean and standard deviation over runs of the figure `key` of a text, or a dash if a run lacks it."""
    values = [summary["evaluation"].get(text, {}).get(key) for summary in group]
    return NO_FIGURE if None in values else spread(values, digits)


def final_order(records: dict[str, list[Record]]) -> str:
    """Return a sentence on the final order of the rows by mean fit loss, and on when this order last changed."""
    characters, by_row = curves_by_row(records, "fit_loss")
    losses = {row: values.mean(0) for row, values in by_row.items()}
    orders = [sorted(losses, key=lambda row: losses[row][i]) for i in range(len(characters))]
    since = max((i + 1 for i, order in enumerate(orders) if order != orders[-1]), default=0)
    order = ", ".join(orders[-1])
    told = f"By fit perplexity on a few windows, from the lowest: {order}"
    if since and since == len(orders) - 1:
        return f"{told}. The order last changed at the last evaluation."
    return f"{told}. This is the order from {characters[since]:,} to {characters[-1]:,} training characters."


def timed_rows(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[str, list[str]]:
    """Return a table of a claim's timings, and sentences on where they come from."""
    record = claims.benchmark_record(claim, tier, results)
    rows = [[key, figure(claim, key, values)] for key, values in measured.items()]
    how = "layers" if claim.measure == "layers" else "steps"
    notes = [
        f"{len(next(iter(measured.values())))} rounds, in each of which every row is timed once, after a warm-up. The "
        f"{how} are {'compiled' if record.get('compiled') else 'not compiled'}. Peak memory is measured once."
        f"{launches(record, 'step' if claim.measure == 'step' else 'pass')}",
        markdown.origin(record["provenance"]),
    ]
    if claim.measure == "layers":
        lengths, tokens = ", ".join(f"{int(T):,}" for T in record["lengths"]), record["provenance"]["tokens"]
        notes.insert(
            0,
            f"One layer without token shift and from its plain start, forward and backward, {tokens:,} characters at "
            f"lengths {lengths}. Seconds and memory are those at the longest length at which all rows ran, and growth "
            "is their ratio to those at the shortest. The growth of a cost that is linear in the length is 1, because "
            "the number of characters is the same.",
        )
    return markdown.table(rows, ["", "measured"]), notes

"""The parts of the READMEs that are generated from records and configs.

An include is a pair of lines, `<!-- include NAME -->` and `<!-- end -->`; what stands between them is replaced. NAME is
`findings` or `variants`, which are written here, or the path of a page from the repository's root. Of a page that
begins with a heading, the part between this heading and the first section is included. Links of a page are relative to
the page; they become relative to the README.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.variants import header, variants

INCLUDE = re.compile(r"(<!-- include (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
VERDICTS = ("reproduced", "contradicted", "equivalent", "undecided")
HEADLINE = "results/headline/novel.md"
OTHER_START = "MHA+, initial_head_mix=uniform"  # a row of that page: MHA+ from another start


def readmes(root: Path) -> list[Path]:
    """The READMEs of the repository and of its folders."""
    return [root / "README.md", *sorted(root.glob("[!.]*/README.md"))]


def filled(readme: Path, root: Path) -> str:
    """The text of a README, with every include taken from the files under `root`."""

    def content(include: re.Match) -> str:
        name = include[2]
        made = MADE[name](root) if name in MADE else page(root / name, readme.parent)
        return include[1] + made + include[3]

    return INCLUDE.sub(content, readme.read_text(encoding="utf-8"))


def page(path: Path, folder: Path) -> str:
    """What a README in `folder` includes of a page."""
    text = path.read_text(encoding="utf-8")
    if text.startswith("# "):
        text = text.partition("\n")[2].partition("\n## ")[0].strip() + "\n"
    return LINK.sub(lambda link: f"]({os.path.relpath(path.parent / link[1], folder)})", text)


def table(path: Path) -> list[list[str]]:
    """The cells of the first table of a page, row by row, its head first."""
    first = re.search(r"(^\|.*\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for line in first[0].splitlines() if set(line) - set("|-: ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def short_variants(_root: Path) -> str:
    """A line for each attention in configs/attn."""
    rows = [[f"`{variant}`", header(variant)["label"], header(variant)["equation"]] for variant in variants()]
    return tabulate(rows, ["`attn=`", "", "equation"], "github", disable_numparse=True) + "\n"


def findings(root: Path) -> str:
    """What the pages in results/ say, a sentence for each: every figure is quoted from one of them."""
    found = [*from_another_start(root), *beside_the_source(root), *verdicts(root), *candidate(root)]
    return "".join(f"- {sentence}\n" for sentence in found)


def from_another_start(root: Path) -> Iterator[str]:
    leads = {name: lead for name, _, lead, *_ in table(root / HEADLINE)}
    if OTHER_START in leads:
        yield (
            "At the source's size much depends on how MHA+'s head mix starts: MHA+ from a random start "
            f"(`attn.initial_head_mix=uniform`) has a lead of {leads[OTHER_START]} over the same MHA+ from the "
            f"identity; AFT's lead over the latter is {leads['AFT']} ([page]({HEADLINE}))."
        )


def beside_the_source(root: Path) -> Iterator[str]:
    """Of small models the leads, and the speed, beside those of the source."""
    figures, quantity = {}, ""
    for name, row, ours, source in table(root / "results/table.md")[1:]:
        quantity = name or quantity
        figures.setdefault(quantity, []).append((row, ours, source))

    def both(quantity: str) -> str:
        return "; ".join(f"{row} {ours}, in the source {source}" for row, ours, source in figures[quantity])

    yield (
        "Small models (`experiment=small`, each attention at its own best learning rate) have these leads over MHA+ on "
        f"the training text: {both('fit, lead over MHA+')} ([table](results/table.md))."
    )
    speeds = both("speed over MHA+'s")
    yield (
        f"A training step at the source's size on a CPU runs at these multiples of MHA+'s speed: {speeds} "
        "([all attentions](results/benchmark/cpu/float32/steps.md))."
    )


def verdicts(root: Path) -> Iterator[str]:
    """The claims that were decided, by tier and verdict, and how many were not."""
    head, *rows = table(root / "results/claims/short.md")
    tiers, undecided = head[2:], []
    for column, tier in enumerate(tiers, start=2):
        for verdict in VERDICTS:
            group = [(row[1], link[1]) for row in rows if (link := re.match(rf"\[{verdict}\]\((.+?)\)", row[column]))]
            claims = "; ".join(f"[{claim}]({link})" for claim, link in group)
            if verdict == "undecided" and group:
                undecided.append(f"{len(group)} of {len(rows)} claims on the {tier}")
            elif group:
                yield f"**{verdict.capitalize()}, {tier}** ({len(group)} of {len(rows)} claims): {claims}."
    waiting = [row[1] for row in rows if not any(cell.startswith("[") for cell in row[2:])]
    yield (
        f"**Undecided**: {', '.join(undecided)}; {len(waiting)} have not been run on any "
        "([all claims](results/CLAIMS.md))."
    )


def candidate(root: Path) -> Iterator[str]:
    rows = table(root / "results/claims/gated_mean.md")[1:]
    leads = [f"{lead} on {text} ({setting})" for setting, text, _, _, lead, _ in rows]
    yield (
        "The search for a better R, W, V proposed `attn=gated_mean`. Its lead over AFT is "
        f"{'; '.join(leads)} ([search](results/search.md))."
    )


MADE: dict[str, Callable[[Path], str]] = {"findings": findings, "variants": short_variants}


def write(root: Path) -> None:
    """Fill the includes of all READMEs."""
    for readme in readmes(root):
        write_bytes(readme, filled(readme, root).encode())

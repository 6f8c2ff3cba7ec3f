"""What each sampler makes of one checkpoint: samples.md, from its record alone."""

import statistics
from pathlib import Path

from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.records import commit, json_record
from training.evaluation import perplexity

GRAM = 4  # characters of a sequence that counts as repeated


def write(results: Path) -> None:
    """Write the page. Raises NotThere if there is no record."""
    record = json_record(results / "samples.json", "python -m scripts.reproduce study=samplers run=FOLDER")
    write_bytes(results / "samples.md", page(record).encode())


def repeated(text: str) -> float:
    """The share of sequences of GRAM characters that occurred earlier in the text."""
    grams = [text[i : i + GRAM] for i in range(len(text) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def page(record: dict) -> str:
    """Contents of samples.md."""
    rows, shown = [], []
    for name, found in record["samplers"].items():
        share = statistics.mean(repeated(text) for text in found["texts"])
        variety = len(set("".join(found["texts"])))
        rows.append(
            [name, f"{perplexity(statistics.mean(found['losses'])):.2f}", f"{100 * share:.1f}%", f"{variety:,}"]
        )
        shown += [f"**{name}**", "", f"> {record['prompt']}{found['texts'][0]}".replace("\n", "\n> "), ""]
    heads = ["sampler", "perplexity of the text, by the model", f"repeated runs of {GRAM}", "different characters"]
    origin, run = record["provenance"], record["run"]
    first = next(iter(record["samplers"].values()))
    return "\n".join(
        [
            "# The samplers on one checkpoint",
            "",
            tabulate(rows, heads, "github", colalign=["left", *["right"] * 3], disable_numparse=True),
            "",
            f"- {len(first['texts'])} samples of {len(first['texts'][0])} characters each, after {record['prompt']}; "
            "the first of each is below. Low perplexity is what the model finds likely, which ends in repetition.",
            f"- Model: {run['name']}, {run['steps']:,} steps, fit perplexity {run['fit_perplexity']:.2f}, "
            f"made by `{run['command']}` at commit {commit(run)}; weights sha256 {record['weights'][:12]}.",
            f"- {origin['device']}, torch {origin['versions']['torch']}; commit {commit(origin)}; "
            f"`{origin['command']}`.",
            "",
            *shown,
        ]
    )

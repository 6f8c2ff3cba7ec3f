"""python scripts/make_table.py: the comparison table in markdown, CSV and LaTeX, from the records alone."""

import csv
import io
import re
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import main
from data.files import UserError, write_bytes
from scripts.records import commit, label, speed_record, summaries

HEADS = {
    "variant": "",
    "fit": "fit perplexity",
    "fit_ratio": "ratio",
    "source_perplexity": "source's",
    "source_perplexity_ratio": "ratio",
    "heldout": "held-out",
    "sliding": "held-out, sliding",
    "speed": "tokens/s",
    "speed_ratio": "ratio",
    "source_speed_ratio": "source's ratio",
    "parameters": "parameters",
    "source_parameters": "source's",
}


def figures(cfg: DictConfig) -> tuple[list[dict], dict[str, list[dict]], dict]:
    """A row of numbers per variant, and the summaries and the speed record that they come from."""
    runs = Path(cfg.runs)
    found = summaries(runs, cfg.rows, cfg.seeds)
    speed = speed_record(runs)
    speeds = {figures.get("run", variant): figures for variant, figures in speed["speed"].items()}
    for row in (*cfg.rows, cfg.ratio_to):
        if timed(row) not in speeds or row not in found:
            raise UserError(f"{runs / 'speed.json'} and rows must hold {row}")
    table = []
    for row in cfg.rows:
        line = {"variant": row, "seeds": len(cfg.seeds)}
        for text in ("fit", "heldout", "sliding"):
            values = [s["evaluation"][text]["perplexity"] for s in found[row] if text in s["evaluation"]]
            line[text] = statistics.mean(values) if values else None
            line[f"{text}_std"] = statistics.stdev(values) if len(values) > 1 else None
        line["speed"] = speeds[timed(row)]["tokens_per_second"]
        line["parameters"] = found[row][0]["parameters"]
        source, reference = cfg.source.get(timed(row)), cfg.source.get(timed(cfg.ratio_to))
        if source:
            line["source_perplexity"], line["source_parameters"] = source.perplexity, source.parameters
        if source and reference:
            line["source_perplexity_ratio"] = source.perplexity / reference.perplexity
            line["source_speed_ratio"] = source.speed / reference.speed
        first = found[row][0]
        line |= {key: first[key] for key in ("experiment", "steps", "device", "precision")} | {"commit": commit(first)}
        line |= {f"data_{key}": first["data"][key] for key in ("name", "characters", "vocabulary", "sha256")}
        table.append(line)
    (reference,) = (line for line in table if line["variant"] == cfg.ratio_to)
    for line in table:
        line["fit_ratio"] = line["fit"] / reference["fit"]
        line["speed_ratio"] = line["speed"] / reference["speed"]
    return table, found, speed


def timed(row: str) -> str:
    """The variant whose steps a row's are: their number is no part of it."""
    return re.sub(r"-steps=\d+", "", row)


def cell(line: dict, key: str) -> str:
    """A figure as it is printed; a dash where there is none."""
    value, spread = line.get(key), line.get(f"{key}_std")
    if value is None:
        return "–"
    if key == "variant":
        return label(timed(value))
    if key.endswith("ratio"):
        return f"{value:.3f}"
    if key in ("speed", "parameters"):
        return f"{value:,.0f}"
    if key == "source_parameters":
        return f"{value / 1e6:.1f}e6"
    return f"{value:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def cell_of_a_sheet(value: object) -> object:
    """Text as a spreadsheet shows it, which would take some for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def origins(cfg: DictConfig, found: dict[str, list[dict]], speed: dict) -> list[str]:
    """What the figures come from, a sentence each."""
    runs = [summary for group in found.values() for summary in group]

    def each(values) -> str:
        return ", ".join(dict.fromkeys(values))

    data, steps, measured = runs[0]["data"], runs[0]["steps"], speed["provenance"]
    seeds = ", ".join(map(str, cfg.seeds))
    spread = f"mean ± standard deviation over seeds {seeds}" if len(cfg.seeds) > 1 else f"seed {seeds}"
    commands = dict.fromkeys([*(s["command"] for s in runs), measured["command"]])
    return [
        f"Experiment {each(s['experiment'] for s in runs)}: "
        f"{steps:,} steps of {runs[0]['tokens'] // steps:,} characters, {spread}.",
        f"Corpus {data['name']}: {data['characters']:,} characters, vocabulary {data['vocabulary']:,}, "
        f"sha256 {data['sha256'][:12]}, {data['holdout']:.0%} held out.",
        f"Device: {each(s['device'] for s in runs)}, {each(s['precision'] for s in runs)}, "
        f"torch {each(s['versions']['torch'] for s in runs)}; commit {each(commit(s) for s in runs)}.",
        f"Speed: {speed['what']}; batch {speed['batch']} x {speed['context']}, vocabulary {speed['vocabulary']:,}, "
        f"{speed['precision']}, {measured['device']}; commit {commit(measured)}.",
        f"Ratios are to {label(timed(cfg.ratio_to))}. "
        "The source trained longer, on another corpus; its speed has no unit.",
        f"Commands: {'; '.join(f'`{c}`' for c in commands)}.",
    ]


def render(cfg: DictConfig) -> dict[str, str]:
    """The contents of table.md, table.csv and table.tex."""
    table, found, speed = figures(cfg)
    cells = [[cell(line, key) for key in HEADS] for line in table]
    align = ["left"] + ["right"] * (len(HEADS) - 1)
    markdown = tabulate(cells, list(HEADS.values()), "github", colalign=align, disable_numparse=True)
    latex = tabulate(cells, list(HEADS.values()), "latex_booktabs", colalign=align, disable_numparse=True)
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, list(dict.fromkeys(k for line in table for k in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: cell_of_a_sheet(value) for key, value in line.items()} for line in table)
    notes = origins(cfg, found, speed)
    return {
        "table.md": "\n".join([markdown, "", *(f"- {note}" for note in notes)]) + "\n",
        "table.csv": sheet.getvalue(),
        "table.tex": "".join(f"% {' '.join(note.split())}\n" for note in notes)
        + latex.replace("±", r"$\pm$").replace("–", "--")
        + "\n",
    }


@main("table")
def run(cfg: DictConfig) -> None:
    contents = render(cfg)
    for name, content in contents.items():
        write_bytes(Path(cfg.out, name), content.encode("utf-8", "backslashreplace"))
    print(contents["table.md"])
    print(f"written to {cfg.out}: {', '.join(contents)}")


if __name__ == "__main__":
    run()

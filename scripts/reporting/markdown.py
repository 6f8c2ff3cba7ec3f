"""Markdown that the pages share: tables, notes, and the sentences that say where figures come from."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from training.provenance import place_of

COMMANDS = "Run a command at the commit of its record: arguments and defaults may have changed since."


def table(rows: list[list[str]], heads: Sequence[str], left: Iterable[int] = (0,)) -> str:
    """Return a table whose columns are aligned to the right, except those with the indices in `left`."""
    align = ["right"] * len(heads)
    for column in left:
        align[column] = "left"
    return tabulate(rows, heads, "github", colalign=align, disable_numparse=True)


def page(*paragraphs: str) -> str:
    """Return paragraphs with an empty line between them; empty paragraphs are left out."""
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def notes(*sentences: str) -> str:
    """Return a list with a bullet for each sentence; empty sentences are left out."""
    return "\n".join(f"- {sentence}" for sentence in filter(None, sentences))


def each(values: Iterable[str], separator: str = ", ") -> str:
    """Return the distinct values in their order, with a separator between them."""
    return separator.join(dict.fromkeys(values))


def commit(record: dict) -> str:
    """Return the commits that made a record; the words "with changes" follow those of uncommitted code."""
    codes = [*record.get("earlier_code", []), record]
    names = [(code["commit"] or "unknown")[:12] + " with changes" * code["dirty"] for code in codes]
    first, *later = dict.fromkeys(names)
    return f"{first} (continued at {' and at '.join(later)})" if later else first


def vocabulary(summary: dict) -> str:
    """Return the size of a run's vocabulary and the hash of its text."""
    return f"vocabulary {summary['data']['vocabulary']:,}, text's sha256 {summary['data']['sha256'][:12]}"


def trained_on(summaries: list[dict]) -> str:
    """Return the devices, precisions, versions and commits of runs."""
    parts = (
        (part["device"], s["precision"], part["torch"])
        for s in summaries
        for part in (*s.get("earlier_devices", []), place_of(s))
    )
    devices = each((f"{device}, {precision}, torch {version}" for device, precision, version in parts), "; ")
    commits = list(dict.fromkeys(map(commit, summaries)))
    return f"{devices}; commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def in_bf16(precisions: dict[str, set[str]]) -> str:
    """Return a sentence that names what was trained in bf16; "" if all runs have the same precision.

    `precisions` are those of the runs of each row, by the row's name.
    """
    if len(set().union(*precisions.values())) < 2:
        return ""
    named = "; ".join(name for name, used in precisions.items() if "bf16" in used)
    return f"Trained in bf16, at least with one seed: {named}. All others were trained in float32."


def origin(provenance: dict) -> str:
    """Return the device, torch version, commit and command of a measurement, and threads and precision if recorded."""
    count = provenance.get("threads")
    threads = f", {count} thread{'s' * (count > 1)}" if count else ""
    precision = f", {provenance['precision']}" if "precision" in provenance else ""
    return (
        f"{provenance['device']}{threads}{precision}, torch {provenance['versions']['torch']}; "
        f"at commit {commit(provenance)}: `{provenance['command']}`."
    )

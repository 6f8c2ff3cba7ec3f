"""Write samples.md from samples.json: texts that each sampler drew from one checkpoint, and figures of them."""

import statistics

from scripts.reporting import markdown
from training.metrics import perplexity

GRAM = 4  # length in characters of the sequences whose repetitions are counted


def repeated(text: str) -> float:
    """Return the share of sequences of GRAM characters that occur earlier in the text."""
    grams = [text[i : i + GRAM] for i in range(len(text) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def page(record: dict) -> str:
    """Return the page: figures of each sampler, and its first text."""
    rows, quotes = [], []
    for name, drawn in record["samplers"].items():
        share = statistics.mean(repeated(text) for text in drawn["texts"])
        variety = len(set("".join(drawn["texts"])))
        loss = statistics.mean(drawn["losses"])
        rows.append([name, f"{perplexity(loss):.2f}", f"{100 * share:.1f}%", f"{variety:,}"])
        quotes += [f"**{name}**", f"> {record['prompt']}{drawn['texts'][0]}".replace("\n", "\n> ")]
    heads = ["sampler", "perplexity under the model"]
    heads += [f"repeated sequences of {GRAM} characters", "different characters"]
    run, texts = record["run"], next(iter(record["samplers"].values()))["texts"]
    sentences = [
        f"{len(texts)} texts of {len(texts[0])} characters from each sampler, after {record['prompt']}; the first one "
        "of each sampler is below. A low perplexity means that the model finds the text likely; such text tends to "
        "repeat itself. `all` draws from all characters. The numbers in a sampler's name are settings of "
        "`python -m scripts.sample`: top-p-x has two, top_p and top_p_x, and top-a has two, top_a and top_a_power.",
        f"Model: {run['name']}, {run['steps']:,} steps, fit perplexity {run['fit_perplexity']:.2f}, trained by "
        f"`{run['command']}` at commit {markdown.commit(run)}; weights sha256 {record['weights'][:12]}.",
        markdown.origin(record["provenance"]),
    ]
    return markdown.page(
        "# The samplers on one checkpoint",
        "Source article A says that its own sampler, which is `top-a 0.02, 2` here, writes texts that read better than "
        "those of top-p and top-k. Nothing below measures how well a text reads, so that [CLAIMS.md](CLAIMS.md) has no "
        "verdict on this: readers can compare the texts.",
        markdown.table(rows, heads),
        markdown.notes(*sentences),
        *quotes,
    )

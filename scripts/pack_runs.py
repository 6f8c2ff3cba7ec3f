"""python -m scripts.pack_runs runs=out/runs/novel: pack the records of finished and diverged runs, to be committed.

The record of every such run below `runs` that matches `match` goes into <out>/<experiment>/<attention>.runs.json,
without the run's weights, text, vocabulary and results of evaluate.py. If <out>/<experiment>.runs.json exists, or with
one_file=true, the record goes into that file, which holds the runs of all attentions. The run's folder stays. If a run
is already packed with other content, overwrite=true is needed.

With weights=FOLDER, the weights of the matching runs are also written to <FOLDER>/<attention> in half precision, with
config, summary and vocabulary, so that scripts/sample.py can write text with them. All of these runs must be finished,
and no two may have the same attention.
"""

import sys
from pathlib import Path

import configs.startup

from omegaconf import DictConfig
from torch import Tensor

from configs.cli import main
from data.files import UserError, write_bytes, write_json
from data.reading import read_tensors
from scripts.reporting.records import finished, state
from training.packed import ENDING, experiment_pack, file_of, pack_of, packed, read_pack
from training.record import Record, read_config
from training.runs import matching, run_folders

Weights = tuple[Record, list[str | None], dict[str, Tensor]]  # a run, its vocabulary and its weights


def pack(runs: Path, match: str, out: Path, overwrite: bool, one_file: bool = False) -> None:
    """Pack the runs that match a glob and have ended, and print to standard error which ones have not ended.

    Raises UserError, before anything is written, if a run cannot be packed.
    """
    packs: dict[Path, dict[str, dict]] = {}
    folders: dict[str, Path] = {}
    counts = dict.fromkeys(("new", "replaced", "unchanged"), 0)
    for record in map(Record, matching(run_folders(runs, packed=False), match)):
        if (status := state(record)) not in ("finished", "diverged"):
            print(f"left out: {record.folder} is {status}", file=sys.stderr)
            continue
        first = folders.setdefault(record.name, record.folder)
        if first != record.folder:
            raise UserError(f"{first} and {record.folder} have the same name: pack them with different values of out")
        path = place_of(out / record.name, one_file)
        if path not in packs:
            packs[path] = dict(read_pack(path)) if path.exists() else {}
        known, parts = packs[path].get(record.folder.name), packed(record)
        if known not in (None, parts) and not overwrite:
            what = f"{record.folder.name}, with other content than in {runs}"
            raise UserError(f"{path} already holds {what}: overwrite=true replaces it")
        counts["new" if known is None else "unchanged" if known == parts else "replaced"] += 1
        packs[path][record.folder.name] = parts
    for path, contents in packs.items():
        write_bytes(path, file_of(contents))
    print(f"packed in {out}: {', '.join(f'{count} {what}' for what, count in counts.items())}")


def place_of(folder: Path, one_file: bool) -> Path:
    """Return the path of the file that a run is packed into; `folder` is <out>/<experiment>/<run>.

    Raises UserError if one_file is set and the experiment already has a packed file for an attention.
    """
    if not one_file:
        return pack_of(folder)
    if own := sorted(folder.parent.glob(f"*{ENDING}")):
        raise UserError(f"{folder.parent} has packed files, such as {own[0].name}: remove them to use one_file=true")
    return experiment_pack(folder.parent)


def halved_weights(runs: Path, match: str, weights: Path, overwrite: bool) -> dict[Path, Weights]:
    """Return {folder to write: (run, its vocabulary, its weights in half precision)} for the runs that match a glob.

    Raises UserError if the weights of a run cannot be kept.
    """
    kept: dict[Path, Weights] = {}
    for record in map(Record, matching(run_folders(runs, packed=False), match)):
        place = weights / read_config(record).job.attn
        if finished(record) is None:
            raise UserError(f"{record.folder} is {state(record)}: only weights of finished runs can be kept")
        if Record(place).model.exists() and not overwrite:
            raise UserError(f"{place} holds weights: overwrite=true replaces them")
        if place in kept:
            names = f"{kept[place][0].name} and {record.name}"
            raise UserError(f"only one run of each attention can have its weights kept: {match} matches {names}")
        tensors = {name: tensor.half() for name, tensor in read_tensors(record.model).items()}
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError(f"{record.model} holds numbers beyond the range of half precision")
        kept[place] = record, record.read_vocabulary(), tensors
    return kept


def write_weights(kept: dict[Path, Weights]) -> None:
    for place, (record, vocabulary, tensors) in kept.items():
        copy = Record(place)
        write_bytes(copy.config, record.config.read_bytes())
        write_json(copy.vocabulary, vocabulary)
        summary = record.read_summary() | {"weights_sha256": copy.save_model(tensors)}
        write_json(copy.summary, {key: value for key, value in summary.items() if key != "text_sha256"})
        print(f"weights: {place}")


@main("pack_runs")
def run(cfg: DictConfig) -> None:
    kept = {}
    if cfg.weights is not None:
        kept = halved_weights(Path(cfg.runs), cfg.match, Path(cfg.weights), cfg.overwrite)
    pack(Path(cfg.runs), cfg.match, Path(cfg.out), cfg.overwrite, cfg.one_file)
    write_weights(kept)


if __name__ == "__main__":
    run()

"""Show the progress of the runs of a study."""

import sys

from tqdm import tqdm

from training.progress import duration


class Overview:
    """A progress bar for all runs, with the names of those that are in training, and a line for each run that ends.

    `works` has the FLOPs of each run by name. There is no bar if standard error is not a terminal.
    """

    def __init__(self, works: dict[str, float]):
        self.works, self.shares = works, {}
        self.ended = 0
        form = "{percentage:3.0f}%|{bar:20}| {elapsed}, {remaining} left: {desc}"
        self.bar = tqdm(total=sum(works.values()), bar_format=form, dynamic_ncols=True, disable=None)

    def at(self, name: str, share: float) -> None:
        """Update the bar for a run that has finished this share of its steps, from 0 to 1."""
        self.shares[name] = share
        running = [f"{name} {share:.0%}" for name, share in self.shares.items() if share < 1]
        self.bar.set_description_str(", ".join(running), refresh=False)
        self.bar.update(sum(self.works[name] * share for name, share in self.shares.items()) - self.bar.n)

    def end(self, name: str, seconds: float, error: str | None) -> None:
        """Update the bar for a run that has ended, and print how long it took or its error."""
        self.ended += 1
        self.at(name, 1.0)
        what = f"failed: {error}" if error else duration(seconds)
        tqdm.write(f"{self.ended}/{len(self.works)} {name}: {what}", file=sys.stdout)
        sys.stdout.flush()

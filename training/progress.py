"""Show how far a run has come and how long it will take."""

import sys
import time

from tqdm import tqdm


class Progress:
    """Show a progress bar on a terminal, or else print lines; estimate the remaining time after a few steps."""

    first = 5  # steps after which the time is estimated
    quiet = 20  # without a terminal, the least number of seconds between two lines of `advance`

    def __init__(self, step: int, steps: int, shown: bool):
        self.done, self.start, self.steps = step, step, steps
        self.last = self.began = time.perf_counter()
        terminal = shown and sys.stderr.isatty()
        self.bar = tqdm(initial=step, total=steps, unit="step", dynamic_ncols=True) if terminal else None

    def needs_rate(self) -> bool:
        return self.done - self.start + 1 == self.first

    def advance(self, figures: str | None = None, rate: float | None = None) -> None:
        """Count one more step. If `figures` is given, `rate`, the tokens per second, is needed too.

        The time that is left is estimated from all steps but the first, which can take long if it compiles the model.
        A bar always shows figures and rate. Without a terminal, they are printed if that was last done more than
        `quiet` seconds ago, and at the last step.
        """
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        taken = self.done - self.start
        if taken == 1:
            self.first_took = time.perf_counter() - self.began
        if figures is None:
            return
        pace = (time.perf_counter() - self.began - self.first_took) / (taken - 1) if taken > 1 else self.first_took
        left = (self.steps - self.done) * pace
        figures = f"{figures}, {rate:,.0f} tokens/s"
        if taken == self.first:
            self.say(f"the remaining steps will take about {duration(left)}, without evaluations")
        if self.bar is not None:
            self.bar.set_postfix_str(figures)
        elif time.perf_counter() - self.last > self.quiet or self.done == self.steps:
            self.last = time.perf_counter()
            self.say(f"step {self.done}/{self.steps}: {figures}, {duration(left)} left")

    def say(self, line: str) -> None:
        tqdm.write(line) if self.bar is not None else print(line, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit, such as 90 s as 2 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 100:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} hours" if hours < 100 else f"{hours / 24:.1f} days"

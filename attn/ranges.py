"""Ranges of numbers, as annotations of arguments. configs/checking.py checks the values of a config against them."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The finite numbers x with x >= least, x > above and x < below."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def problem(self, number: float) -> str | None:
        """Return what `number` must be, such as "1 or more", or None if it is within the range."""
        if not (number >= self.least and number > self.above):
            return str(self)
        if number < self.below:
            return None
        if number == math.inf and self.below > 1:
            return "finite"
        return f"below 2^{round(math.log2(self.below))}" if self.below > 1 else str(self)

    def __str__(self) -> str:
        if self.below <= 1:
            return f"from {self.least} to below {self.below}"
        if self.above > -math.inf:
            return f"above {self.above}"
        return f"{self.least} or more" if self.least > -math.inf else "a finite number"


Size = Annotated[int, Range(1, below=2**31)]

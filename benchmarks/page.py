"""Results on a page of the documentation: tables, intervals, and the part that a program writes."""

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


def table(head: Sequence[str], body: Sequence[Sequence[str]], texts: Collection[int] = (0,)) -> str:
    """Return a Markdown table. `texts` are the columns that hold text; the others hold numbers."""
    aligned = ["---" if column in texts else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, aligned, *body])


class Interval(NamedTuple):
    """A mean, and half the width of its confidence interval."""

    mean: float
    margin: float

    @property
    def finite(self) -> bool:
        """Return whether every value was finite."""
        return math.isfinite(self.mean)

    def contains(self, value: float) -> bool:
        """Return whether the interval contains a value; the bounds count as inside."""
        return abs(value - self.mean) <= self.margin


def interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """Return the mean of two or more values, with its interval by Student's t."""
    n = len(values)
    quantile = stats.t.ppf((1 + confidence) / 2, n - 1)
    return Interval(float(np.mean(values)), float(quantile * np.std(values, ddof=1) / n**0.5))


class Part(NamedTuple):
    """The part of a page that `make fidelity` writes, between two comments."""

    name: str

    @property
    def begin(self) -> str:
        """Return the comment before it."""
        return f"<!-- {self.name}: `make fidelity` writes this part -->"

    @property
    def end(self) -> str:
        """Return the comment after it."""
        return f"<!-- {self.name}: end -->"

    def replaced(self, page: str, text: str) -> str:
        """Return the page with another text in this part."""
        begin, end = self.begin, self.end
        if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
            raise ValueError(f"the page must hold the lines {begin!r} and {end!r}, in this order")
        before, _, rest = page.partition(begin)
        return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def as_json(results: dict[str, Any]) -> str:
    """Return the results as JSON, with each list of numbers on one line."""
    indented = json.dumps(results, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), indented) + "\n"

"""The result of `precision_search`, which prints as a table."""

import dataclasses
from collections.abc import Mapping

from optax_lossscale.diagnostics.reports import Report

_WHAT_IT_IS = (
    "This is the error of one gradient, for one batch and one set of parameters. It need not harm\n"
    "training."
)
_NO_CHOICE_HELPS = (
    "No choice of lines helps: even with all in float32, the error is above the tolerance.\n"
    "Is the loss the same in each call? NumPy draws other random numbers in each."
)
_LARGE = 0.5  # the error of an array that is named, whatever the error of the gradient is


@dataclasses.dataclass(frozen=True)
class LineError:
    """What one line costs in exactness, from `precision_search`.

    Attributes:
      error: The error of the gradient if only the products of this line run in half precision.
      flops: Their share of the floating-point operations in the function's products, from 0 to 1.
    """

    error: float
    flops: float


class LineErrors(Report[LineError]):
    """Errors by line."""

    def __repr__(self) -> str:
        """Return the table, with the largest error first."""
        rows = sorted(self.items(), key=lambda item: -item[1].error)
        return "\n".join(f"  {x.error:8.2g}  {x.flops:5.1%}  {line}" for line, x in rows)


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionSearch:
    """Which lines need float32, from `precision_search`. It prints as a table.

    Attributes:
      error: The error of the gradient with all products in half precision.
      array: The array of the gradient with the largest error, as a key path.
      array_error: The error of that array.
      lines: The error of each line alone in half precision, and its share of the operations. Empty
        if `error` is within the tolerance.
      keep: The lines that must stay in float32, the most sensitive first: keys of `lines`, for
        `autocast(fun, dtype, keep=found.keep)`.
      error_kept: The error with these lines in float32. It equals `error` if there are none.
      dtype: The half precision, as text.
      tolerance: The largest error that was allowed.
    """

    error: float
    array: str
    array_error: float
    lines: Mapping[str, LineError]
    keep: tuple[str, ...]
    error_kept: float
    dtype: str
    tolerance: float
    # What the text adds about this search.
    notes: tuple[str, ...] = dataclasses.field(init=False, default=())

    def __repr__(self) -> str:
        """Return the table."""
        text = [f"With all products in {self.dtype}, the gradient is off by {self.error:.2g}."]
        if self.array:
            text[0] += f" Its worst array is `{self.array}`, off by {self.array_error:.2g}."
        if self.array_error > _LARGE:
            text.append("So that array is wrong: a mean over all arrays can hide one.")
        if not self.lines:
            text.append(f"No line needs float32 for a tolerance of {self.tolerance:g}.")
            return "\n".join([*text, *self.notes, _WHAT_IT_IS])
        text += [f"Each line alone in {self.dtype}: error, share of the operations, line", ""]
        text += [repr(self.lines), "", "Lines to keep in float32:", ""]
        text += [f"  {line}" for line in self.keep]
        text += ["", f"With these in float32, it is off by {self.error_kept:.2g}."]
        is_within = self.error_kept <= self.tolerance
        last = self._how_to_keep() if is_within else [_NO_CHOICE_HELPS]
        return "\n".join([*text, *self.notes, _WHAT_IT_IS, *last])

    def _how_to_keep(self) -> list[str]:
        share = sum(self.lines[line].flops for line in self.keep)
        return [
            f"They have {share:.1%} of the operations. Keep them in float32:",
            "",
            f"  autocast(fun, jnp.{self.dtype}, keep=found.keep)",
            "",
            'Or in the code: `precision="highest"` in the product, or around it, and around a call',
            'of a layer of others, `with jax.default_matmul_precision("highest"):`.',
        ]

"""Run matrix products in half precision, and leave everything else in float32.

A function is traced, its jaxpr is edited, and the edited jaxpr is evaluated.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._autocast import messages
from optax_lossscale._autocast.checkpointed_layers import with_saved_halves
from optax_lossscale._autocast.inside import hidden_storage
from optax_lossscale._autocast.products import with_halves
from optax_lossscale._autocast.what_is_cast import scope_of
from optax_lossscale._support import checks, nnx
from optax_lossscale._support.jaxprs import Jaxpr, evaluate, traced, without_constants
from optax_lossscale._support.lines import GivenWarnings, is_own, line_key
from optax_lossscale._support.notes import add_note
from optax_lossscale._support.tree import HALF, Leaf

P = ParamSpec("P")
Result = TypeVar("Result")


def autocast(
    fun: Callable[P, Result],
    dtype: DTypeLike,
    *,
    keep: Iterable[str] = (),
    checkpoint_dtype: DTypeLike | None = None,
) -> Callable[P, Result]:
    """Return `fun` with its matrix products and convolutions in half precision.

    `autocast` is to JAX what `torch.autocast` is to PyTorch. The code of the model does not change.
    Dense layers, convolutions and attention are matrix products, so they run in `dtype`, forward
    and backward. Norms, softmax, masks, positions, statistics and losses are not, so they run in
    float32. Together with `with_loss_scaling`, this is automatic mixed precision.

    Half precision is a storage format here: arguments in float16 and bfloat16 are read as float32.
    Each is converted where it is used, so that the cotangents of all its uses are added in float32.
    Gradients have the dtypes of the arguments.

    A product runs in `dtype` if it meets all of these conditions:

    - Its rows, columns and contracted length are at least 8 each. Batch dimensions do not count. A
      convolution needs 8 output positions in the whole batch, 8 output channels, and 8 weights for
      each channel. So outer and inner products, products of a matrix and a vector, and products of
      3-D coordinates stay in float32.
    - Its operands are float32 or half precision, and at least one is float32. Its result is
      float32.
    - Its precision is the default one, and its line is not in `keep`. To keep a product in float32
      in the code, use JAX's own settings: `precision="highest"`, or
      `with jax.default_matmul_precision("highest"):`.
    - Neither operand is computed only from constants in the code, as an identity, a triangle of
      ones or a Fourier matrix is.

    Products inside `jax.jit`, `jax.checkpoint`, `scan`, `cond`, `shard_map` and `pmap` are cast
    too. A `while_loop` is left alone, since its end may depend on digits that half precision does
    not have. So are functions with custom derivative or batching rules (`custom_vjp`,
    `custom_jvp`), Pallas kernels and foreign calls: cast their arguments yourself. The backward
    pass of a `scan` repeats cheap arithmetic, and elementary functions where that saves memory,
    instead of storing their results.

    With `checkpoint_dtype`, a layer in `jax.checkpoint` saves its inputs in half precision. This
    concerns float32 inputs with at least two axes and 64 elements that depend on a product in half
    precision; in a scan, the carries. The forward pass does not change. The backward pass computes
    the layer again from its rounded input. So do not use it for layers that pass on coordinates or
    another large and precise state, or give their checkpoint a policy other than
    `nothing_saveable`: it then saves inputs unchanged.

    Args:
      fun: The loss or the model. It must be pure and traceable, as for `jax.checkpoint`: no Python
        `if` on values, and nothing written to a closure. Pass parameters, random keys and modules
        of `flax.nnx` as arguments. Write `autocast(jax.vmap(f))`: a `vmap` outside hides the batch.
        Do not wrap a training step: inside, an optimizer cannot see which arrays are stored in half
        precision.
      dtype: `jnp.float16`, `jnp.bfloat16`, or `jnp.float32`, which casts no product. If one
        `autocast` is inside another, the inner one decides.
      keep: Lines whose products stay in float32, at `precision="highest"`: the `keep` of
        `precision_search`, or other lines as it and `precision_report` write them,
        `file:line: code`. A line is recognized by its file's name and its code, not by its number
        or its folder, so edits elsewhere, a restart or another machine change nothing. Code of
        several lines is one statement. Lines in a notebook have only their code. Lines that look
        the same are kept together.
      checkpoint_dtype: The dtype of what checkpointed layers save: `jnp.bfloat16`, `jnp.float16`,
        or None to save inputs unchanged. Use bfloat16 with `dtype=jnp.float16`, too: in float16, an
        input above 65,504 would be infinite. With `dtype=jnp.float32`, nothing changes.

    Returns:
      A function with the same signature. Each call traces `fun` once. Results are float32. An
      argument that is returned unchanged keeps its stored dtype, as does each `Variable` of
      `flax.nnx`, whatever is written into it. Only JAX arrays are traced; everything else is passed
      through.

    Raises:
      TypeError: If `fun` cannot be called, `dtype` or `checkpoint_dtype` is not one of these three,
        or `keep` is not an iterable of strings.
      ValueError: If `checkpoint_dtype` is float16 and `dtype` is bfloat16. If `fun` has
        half-precision arguments and updates an optimizer that stores arrays in half precision:
        `with_master_weights`, `with_stochastic_rounding` or `with_bfloat16_state`.

    Warns:
      UserWarning: Once, if less than half of the floating-point operations in products run in
        `dtype` or a narrower one. float16 does not count as narrower than bfloat16. Products of
        lines in `keep` are left out, and those that the code keeps in float32 by their precision,
        unless less than a tenth of all operations is cast. The message names the line of the
        largest other product, and the reason.
        Once, if a line in `keep` makes no product.
        Once, if `dtype` is float16 and `fun` itself computes a power, a sum or an exponential in
        float16, as layers made with `dtype=jnp.float16` do: it may overflow, unlike in float32.
        Once, if `fun` closes over arrays in half precision, which `autocast` cannot read as
        float32. Once, if `fun` casts a stored argument back to half precision and looks up rows in
        it, as `nnx.Embed(param_dtype=jnp.bfloat16)` does: their gradients would be added in half
        precision.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"hidden": jnp.ones((8, 64)), "head": jnp.ones((64, 8))}
      >>> def loss_fn(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["hidden"]) @ params["head"])
      >>> step = jax.grad(ols.autocast(loss_fn, jnp.float16))
      >>> report = ols.diagnostics.precision_report(step, params, jnp.ones((32, 8)))
      >>> {dtype: products.count for dtype, products in report.items()}
      {'float16': 4}
      >>> stored = ols.cast(params, jnp.bfloat16)
      >>> loss_and_grads = jax.value_and_grad(ols.autocast(loss_fn, jnp.bfloat16))
      >>> loss, grads = loss_and_grads(stored, jnp.ones((32, 8)))
      >>> str(loss.dtype), {name: str(grad.dtype) for name, grad in grads.items()}
      ('float32', {'head': 'bfloat16', 'hidden': 'bfloat16'})

    References:
      Tensor cores multiply blocks whose shortest side is 8: Micikevicius et al., `Mixed Precision
      Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    checks.require_function(
        "fun", fun, "Give the loss function or the model itself, not its result."
    )
    dtype = checks.read_half_or_float32(dtype)
    saved = checks.read_checkpoint_dtype(checkpoint_dtype, dtype)
    lines = frozenset(map(line_key, checks.read_strings("keep", keep)))
    return autocast_except(lines, fun, dtype, GivenWarnings(), saved)


def autocast_except(
    keep: frozenset[str],
    fun: Callable[P, Result],
    dtype: np.dtype,
    given: GivenWarnings,
    checkpoint_dtype: np.dtype | None = None,
) -> Callable[P, Result]:
    """Return `autocast(fun, dtype)`, except that products on the lines in `keep` stay in float32.

    They are given by their keys, as `line_key` returns them. `given` has the warnings that were
    given.
    """

    def edited(jaxpr: Jaxpr) -> Jaxpr:
        in_half = with_halves(jaxpr, dtype, keep)
        messages.warn_of_program(jaxpr, in_half, dtype, keep, given)
        return with_saved_halves(in_half, checkpoint_dtype) if checkpoint_dtype else in_half

    def transform(call: Callable[..., Any]) -> Callable[..., Any]:
        marked = jax.named_call(call, name=scope_of(dtype))  # for an outer `autocast`
        return _evaluated(edited, given, marked)

    return nnx.transformed(fun, transform, keep_dtypes=True)


def _evaluated(
    edited: Callable[[Jaxpr], Jaxpr], given: GivenWarnings, fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that traces `fun`, edits its jaxpr and evaluates it.

    `fun` reads arrays in half precision as float32. `given` has the warnings that were given.
    """

    def evaluated(*args: Any) -> Any:
        as_stored: dict[int, Leaf] = {}  # NumPy arrays by the `id` of the array that `fun` reads

        def numpy_in_float32(leaf: Leaf) -> Leaf:
            if not isinstance(leaf, (np.ndarray, np.generic)) or leaf.dtype not in HALF:
                return leaf
            wide = leaf.astype(np.float32)
            as_stored[id(wide)] = leaf
            return wide

        def call(args: tuple[Any, ...]) -> Any:
            return fun(*jax.tree.map(lambda x: x.astype(jnp.float32) if _is_half(x) else x, args))

        args = jax.tree.map(numpy_in_float32, args)
        if as_stored or any(map(_is_half, jax.tree.leaves(args))):
            with hidden_storage(), _note_about_dtypes():
                jaxpr, arrays, join = traced(call, args, _is_jax_array)
            messages.warn_of_lookups(jaxpr, given)
        else:
            jaxpr, arrays, join = traced(call, args, _is_jax_array)
        jaxpr = edited(jaxpr)
        results = join(evaluate(without_constants(jaxpr), jaxpr.consts, *arrays))
        return jax.tree.map(lambda x: as_stored.get(id(x), x), results)

    return evaluated


def _is_jax_array(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array)


def _is_half(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and leaf.dtype in HALF


@contextlib.contextmanager
def _note_about_dtypes() -> Generator[None]:
    """Add a note to an error of code that may depend on how its arguments are stored."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not is_own(error):
            add_note(
                error,
                "If the error is about dtypes: `autocast` reads arguments in half precision as "
                "float32, so a dtype that the code names may not fit, such as the bfloat16 of a "
                "carry, a cache, or a layer made with `param_dtype=jnp.bfloat16`. Leave it out, or "
                "make the layer in float32, and store its parameters with `cast`.",
            )
        raise

"""Run a function operation by operation, to find the one that makes the first NaN or infinity."""

import dataclasses
import inspect
import itertools
import linecache
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from optax_lossscale._tree import KeyPath, PyTree, is_array, is_inexact

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

# Operations that do nothing but run a function, which is followed instead.
_CALLS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "jit",
        "pjit",
        "remat2",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstNonfinite:
    """Where the first NaN or infinity comes from, as `first_nonfinite` found it.

    `str` writes it in words.

    Attributes:
      layer: The layer: the key path, in the arguments of the function, of the parameters that were
        read last before the operation; for a cast of a layer's input, of that layer. Without any,
        the named scope. For an argument that is not finite itself, its own key path.
      operation: The name of the operation in JAX, such as `"dot_general"` or
        `"convert_element_type"` (a cast). None for an argument.
      dtype: The type of the array that is not finite.
      nan: Elements of it that are NaN.
      inf: Elements of it that are infinite.
      size: All its elements.
      scope: The `jax.named_scope` of the operation: in Flax's Linen the module's path, in Equinox
        the types of the layers, `""` without any.
      backward: Whether the operation belongs to the backward pass.
      source: The line of your own code that the operation comes from, with its file.
    """

    layer: str
    operation: str | None
    dtype: str
    nan: int
    inf: int
    size: int
    scope: str = ""
    backward: bool = False
    source: str = ""

    def __str__(self) -> str:
        """Return the finding in words, one fact a line."""
        counts = f"{self.nan} NaN and {self.inf} infinite of {self.size} elements ({self.dtype})"
        if self.operation is None:
            return f"`{self.layer}` is not finite before the first operation: {counts}"
        when = " in the backward pass" if self.backward else ""
        lines = [f"`{self.operation}`{when} is the first to make {counts}"]
        facts = {"layer": self.layer, "scope": self.scope, "source": self.source}
        lines += [f"  {name}: {fact}" for name, fact in facts.items() if fact]
        return "\n".join(lines)


def first_nonfinite(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> FirstNonfinite | None:
    """Find the operation that makes the first NaN or infinity: which layer overflowed?

    `fun` is traced, and run on the host operation by operation in the order of the program. Of the
    operations that turn finite numbers into NaN or infinity, the earliest whose result reaches the
    output is returned. What does not reach the output is harmless: `x / (1 + exp(-x))` is right
    where `exp` overflows. Its derivative is not, so if the loss is finite and the gradients are
    not, search `jax.grad(loss_fn)`.

    Infinities that are written into the code (`jnp.where(mask, scores, -jnp.inf)`), and negative
    ones in the arguments, are taken as meant. An operation that makes NaN of them is returned.

    This is much slower than a compiled call: use it after training has failed. Each operation is
    rounded to its own dtype. A compiled function may keep more digits in between, and overflow
    later. Calls, `jax.checkpoint`, `jax.lax.cond` and `jax.lax.scan` are followed; other operations
    that hold a function, `jax.lax.while_loop` for one, are returned as a whole.

    Args:
      fun: The function: the loss, the model, or a gradient function for the backward pass. Any
        framework's; hand the parameters or the module in as an argument, because layers are named
        after the arguments' key paths.
      *args: The arguments of `fun`, any pytrees. Arrays are traced, and every other leaf is handed
        on as it is.
      **kwargs: Its keyword arguments, likewise.

    Returns:
      What made the first NaN or infinity, or None if the outputs are finite. If an argument holds
      NaN or positive infinity that reaches the output, that argument.

    Raises:
      TypeError: If an argument is traced: call it outside of `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> params = {"energy": {"w": jnp.full((2, 2), 300.0)}, "head": {"w": jnp.ones((2, 1))}}
      >>> def loss_fn(params, x):
      ...     energy = (x @ params["energy"]["w"]).astype(jnp.float16) ** 2
      ...     return jnp.mean(energy.astype(jnp.float32) @ params["head"]["w"])
      >>> found = ols.first_nonfinite(loss_fn, params, jnp.ones((4, 2)))
      >>> found.layer, found.operation, found.inf
      ("params['energy']", 'integer_pow', 8)
    """
    named = _by_name(fun, args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    if any(isinstance(array, Tracer) for array in arrays):
        raise TypeError(
            "`args` must hold values, got traced arrays. Call `first_nonfinite` outside of "
            "`jax.jit`; `fun` itself may be jitted."
        )

    def on_arrays(*arrays: jax.Array) -> PyTree:
        replaced = iter(arrays)
        both = [next(replaced) if is_array(leaf) else leaf for leaf in leaves]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, both)
        return [x for x in jax.tree.leaves(fun(*inner_args, **inner_kwargs)) if is_array(x)]

    # NaN is what is looked for, and the user's own guards against it would stop the search.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        closed = jax.make_jaxpr(on_arrays)(*arrays)
        return _Search(named).run_all(closed, arrays)


def _by_name(
    fun: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, KeyPath]]:
    """Return the argument and the key path within it of each array, in the order of the tree."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a built-in
        parameters = ()
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    roots = [*zip(names, args, strict=False), *kwargs.items()]
    # Keyword arguments are leaves in alphabetical order, as JAX flattens dicts.
    roots[len(args) :] = sorted(roots[len(args) :])
    return [
        (name, path)
        for name, tree in roots
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf)
    ]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array of the arguments."""

    position: int
    name: str  # its key path
    layer: str  # that of the layer it belongs to
    is_parameter: bool


@dataclasses.dataclass
class _Origin:
    """When and by what the first NaN or infinity on the way to a value was made."""

    time: int
    found: FirstNonfinite
    cast: Any = None  # the result, if a cast made them


@dataclasses.dataclass(frozen=True)
class _Value:
    """An array, and what is known of its past.

    Attributes:
      array: The array itself.
      kinds: Which of `"nan"`, `"inf"` and `"-inf"` it holds.
      origin: Where they come from; None if they are meant, or there are none.
      leaf: The argument that it was computed from alone, by casting it for example.
      layer: When parameters were last read on the way to it, and of which layer.
      is_backward: Whether it was computed in the backward pass.
    """

    array: Any
    kinds: frozenset[str] = frozenset()
    origin: _Origin | None = None
    leaf: _Leaf | None = None
    layer: tuple[int, str] | None = None
    is_backward: bool = False


class _Search:
    def __init__(self, named: list[tuple[str, KeyPath]]) -> None:
        self._named = named
        self._clock = itertools.count()

    def run_all(self, closed: ClosedJaxpr, arrays: Sequence[Any]) -> FirstNonfinite | None:
        outputs = self._run(
            closed.jaxpr,
            [self._constant(const) for const in closed.consts],
            list(self._arguments(closed.jaxpr, arrays)),
        )
        origins = [output.origin for output in outputs if output.origin]
        return min(origins, key=_time).found if origins else None

    def _arguments(self, jaxpr: Jaxpr, arrays: Sequence[Any]) -> Iterator[_Value]:
        # The model is the argument of which the most arrays are used; batches have few.
        used = {var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal)}
        counts: dict[str, int] = {}
        for (name, _), var, array in zip(self._named, jaxpr.invars, arrays, strict=True):
            counts[name] = counts.get(name, 0) + (var in used and is_inexact(array))
        for position, ((name, path), array) in enumerate(zip(self._named, arrays, strict=True)):
            leaf = _Leaf(
                position=position,
                name=name + jax.tree_util.keystr(path),
                layer=name + jax.tree_util.keystr(_layer_path(path)),
                is_parameter=2 * counts[name] > max(counts.values()),
            )
            value = self._input(array, leaf.name, meant=frozenset({"-inf"}))
            yield dataclasses.replace(value, leaf=leaf if is_inexact(array) else None)

    def _constant(self, array: Any) -> _Value:
        return self._input(array, "an array that `fun` closes over", meant={"inf", "-inf"})

    def _input(self, array: Any, name: str, meant: Iterable[str]) -> _Value:
        kinds = _kinds(array)
        if kinds <= set(meant):
            return _Value(array, kinds)
        found = FirstNonfinite(layer=name, operation=None, **_counts(array))
        return _Value(array, kinds, _Origin(next(self._clock), found))

    def _run(
        self, jaxpr: Jaxpr, consts: list[_Value], args: list[_Value], scope: str = ""
    ) -> list[_Value]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val, _kinds(atom.val)) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            here = f"{scope}/{eqn.source_info.name_stack}"
            results = self._follow(jaxpr, eqn, [read(atom) for atom in eqn.invars], here)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _follow(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[_Value], scope: str
    ) -> list[_Value]:
        """Run an operation, by way of the function that it holds if there is one to follow."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            held = next(params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params)
            return self._run_held(held, operands, scope)
        if name == "cond":
            index, *rest = operands
            branch = int(np.clip(index.array, 0, len(params["branches"]) - 1))
            return self._run_held(params["branches"][branch], rest, scope)
        results = self._apply(jaxpr, eqn, operands, scope)
        if name == "scan" and any(result.origin for result in results):
            first = self._first_in_scan(eqn, [*operands], scope)
            results = [
                dataclasses.replace(x, origin=first) if x.origin and first else x for x in results
            ]
        return results

    def _run_held(self, held: Any, operands: list[_Value], scope: str) -> list[_Value]:
        consts = [self._constant(const) for const in getattr(held, "consts", ())]
        return self._run(getattr(held, "jaxpr", held), consts, operands, scope)

    def _first_in_scan(self, eqn: JaxprEqn, operands: list[_Value], scope: str) -> _Origin | None:
        """Run a scan step by step, up to the first step that hands on what is not finite."""
        body = eqn.params["jaxpr"]
        # What is sliced has one axis more outside of the body than inside: JAX's versions differ
        # in how they say it.
        stacked = [
            _rank(outside.aval) > _rank(inside)
            for outside, inside in zip(eqn.invars, body.in_avals, strict=True)
        ]
        carried = [
            _rank(outside.aval) == _rank(inside)
            for outside, inside in zip(eqn.outvars, body.out_avals, strict=True)
        ]
        start = stacked.index(True) if True in stacked else len(stacked)
        carry_at = slice(start - sum(carried), start)
        steps = range(eqn.params["length"])
        for step in reversed(steps) if eqn.params["reverse"] else steps:
            inputs = [
                _sliced(x, step) if is_stacked else x
                for x, is_stacked in zip(operands, stacked, strict=True)
            ]
            results = self._run_held(body, inputs, f"{scope}/step {step}")
            origins = [result.origin for result in results if result.origin]
            if origins:
                return min(origins, key=_time)
            operands[carry_at] = results[: sum(carried)]
        return None

    def _apply(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, operands: list[_Value], scope: str
    ) -> list[_Value]:
        known = {
            atom: value
            for atom, value in zip(eqn.invars, operands, strict=True)
            if not isinstance(atom, Literal)
        }
        variables = list(known.values())
        alone = jaxpr.replace(
            constvars=[],
            invars=[*known],
            outvars=eqn.outvars,
            eqns=[eqn],
            effects=eqn.effects,
        )
        arrays = eval_jaxpr(alone, [], *(value.array for value in variables))
        time = next(self._clock)
        # What `jax.checkpoint` computes a second time is the forward pass.
        is_backward = "transpose(" in scope.rpartition("rematted_computation")[2]
        leaf = variables[0].leaf if len(variables) == 1 else None
        layer = _layer(variables, time, is_backward=is_backward)
        origins = [x.origin for x in operands if x.kinds and x.origin]
        if layer and layer[0] == time:
            # Layers cast their input before they read their parameters.
            for x in variables:
                if x.origin and x.origin.cast is x.array:
                    x.origin.found = dataclasses.replace(x.origin.found, layer=layer[1])
        given = frozenset[str]().union(*(x.kinds for x in operands))

        def result(array: Any) -> _Value:
            kinds = _kinds(array)
            value = _Value(array, kinds, None, leaf, layer, is_backward)
            if not kinds:
                return value
            if origins:
                return dataclasses.replace(value, origin=min(origins, key=_time))
            if given and not kinds - given - {"-inf"}:
                return value  # infinities that are meant
            read = next((x.leaf.name for x in variables if x.leaf), "")
            found = FirstNonfinite(
                layer=layer[1] if layer else read or _readable_scope(scope),
                operation=eqn.primitive.name,
                scope=_readable_scope(scope),
                backward=is_backward,
                source=_source(eqn),
                **_counts(array),
            )
            cast = array if eqn.primitive.name == "convert_element_type" else None
            return dataclasses.replace(value, origin=_Origin(time, found, cast))

        return [result(array) for array in arrays]


def _sliced(value: _Value, step: int) -> _Value:
    array = value.array[step]
    kinds = _kinds(array)
    origin = value.origin if kinds else None
    return dataclasses.replace(value, array=array, kinds=kinds, origin=origin)


def _rank(aval: Any) -> int:
    return len(aval.shape)


def _time(origin: _Origin) -> int:
    return origin.time


def _layer(operands: list[_Value], time: int, *, is_backward: bool) -> tuple[int, str] | None:
    """Return the layer that an operation belongs to."""
    read = [x.leaf for x in operands if x.leaf and x.leaf.is_parameter]
    if read:  # parameters come before the batch, if they cannot be told apart
        return time, min(read, key=lambda leaf: leaf.position).layer
    # A derivative is taken where the forward pass was, not where the backward pass comes from.
    forward = [x.layer for x in operands if x.layer and not x.is_backward]
    layers = forward if is_backward and forward else [x.layer for x in operands if x.layer]
    return max(layers, default=None)


def _layer_path(path: KeyPath) -> KeyPath:
    """Return the path of the layer that a parameter belongs to."""
    # Flax keeps parameters in boxes.
    if path and jax.tree_util.keystr(path[-1:]) in {".value", ".raw_value"}:
        path = path[:-1]
    return path[:-1] or path  # a parameter outside of any layer is its own


def _kinds(array: Any) -> frozenset[str]:
    if not is_inexact(array):
        return frozenset()
    numbers: Any = np.asarray(array)
    if np.isfinite(numbers).all():
        return frozenset()
    parts = (numbers.real, numbers.imag) if np.iscomplexobj(numbers) else (numbers,)
    tests = {"nan": np.isnan, "inf": lambda x: x == np.inf, "-inf": lambda x: x == -np.inf}
    return frozenset(name for name, test in tests.items() if any(test(x).any() for x in parts))


def _counts(array: Any) -> dict[str, Any]:
    numbers = np.asarray(array)
    is_nan = np.isnan(numbers)
    return {
        "dtype": str(numbers.dtype),
        "nan": int(is_nan.sum()),
        "inf": int((~np.isfinite(numbers) & ~is_nan).sum()),
        "size": numbers.size,
    }


def _readable_scope(scope: str) -> str:
    """Return the names in a scope, without the transformations around them."""
    names = re.sub(r"\w+\(|\)", "", scope)
    return "/".join(name for name in names.split("/") if name)


def _source(eqn: JaxprEqn) -> str:
    """Return the innermost line that is not of an installed package."""
    traceback = eqn.source_info.traceback
    frames = list(traceback.frames) if traceback else []
    installed = {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
    installed.add(str(Path(__file__).parent))
    for frame in frames:
        if not frame.file_name.startswith((*installed, "<frozen")):
            line = linecache.getline(frame.file_name, frame.line_num).strip()
            return f"{frame.file_name}:{frame.line_num}" + (f": {line}" if line else "")
    return ""

"""JAX's primitives by name: which are matrix products, calls, loops, moves and arithmetic.

The names are those of jax 0.7 to 0.12. A version that lacks one never matches it.
"""

# Matrix products and convolutions; the last is `jax.nn.scaled_matmul`, scaled by blocks.
PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
SCALED_PRODUCT = "scaled_matmul_wrapper"

# What runs a function once, with its own arrays. `eval_jaxpr` is `closed_call` since jax 0.12.
PLAIN_CALLS = frozenset(["closed_call", "eval_jaxpr", "jit", "remat2"])
# The same with a derivative that the program defines.
CUSTOM_DERIVATIVES = frozenset(["custom_jvp_call", "custom_vjp_call"])
CALLS = PLAIN_CALLS | CUSTOM_DERIVATIVES
# What runs a function on each device, with its part of the arrays.
DEVICE_MAPS = frozenset(["shard_map", "xla_pmap"])

# What only moves elements, if it returns as many as it takes: see `jaxprs.is_move`.
MOVES = frozenset(
    [
        *("broadcast_in_dim", "concatenate", "copy", "reshape", "rev"),
        *("sharding_constraint", "squeeze", "stack", "transpose"),
    ]
)
COMPARISONS = frozenset(["eq", "ge", "gt", "is_finite", "le", "lt", "ne"])
# What costs next to nothing to compute again: no sum over elements, no product of matrices, no
# elementary function, no random number, no collective.
ARITHMETIC = (
    MOVES
    | COMPARISONS
    | frozenset(
        [
            *("abs", "add", "add_any", "and", "bitcast_convert_type", "cbrt", "ceil", "clamp"),
            *("complex", "conj", "convert_element_type", "device_put", "div", "floor", "imag"),
            *("integer_pow", "iota", "max", "min", "mul", "neg", "not", "one_minus_square", "or"),
            *("pad", "pcast", "polynomial", "pvary", "real", "reduce_precision", "rem", "round"),
            *("rsqrt", "select_n", "sign", "slice", "split", "sqrt", "square", "stop_gradient"),
            *("sub", "tile", "unstack", "xor"),
        ]
    )
)

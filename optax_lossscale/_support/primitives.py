"""The names of JAX's primitives: matrix products, calls, data movement and arithmetic.

They are the names in jax 0.7 to 0.12. No version has them all.
"""

# Matrix products and convolutions, and the block-scaled product of `jax.nn.scaled_matmul`.
PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
SCALED_PRODUCT = "scaled_matmul_wrapper"

# These call a function once, with the operands. jax 0.12 renamed `closed_call` to `eval_jaxpr`.
PLAIN_CALLS = frozenset(["closed_call", "eval_jaxpr", "jit", "remat2"])
# The same for functions with a custom derivative.
CUSTOM_DERIVATIVES = frozenset(["custom_jvp_call", "custom_vjp_call"])
CALLS = PLAIN_CALLS | CUSTOM_DERIVATIVES
# These call a function on each device, with its shards of the operands.
DEVICE_MAPS = frozenset(["shard_map", "xla_pmap"])

# On the NaN of a skipped step, these may not return, or may have effects. LAPACK's
# routines for eigenvalues and singular values iterate until they converge.
LOOPS_AND_CALLBACKS = frozenset(
    ["while", "eig", "eigh", "schur", "svd", "pure_callback", "ffi_call"]
)

# What runs a function several times.
LOOPS = frozenset(["scan", "while"])

# These only move elements, if the result is as large as the operands: see `jaxprs.is_move`.
MOVES = frozenset(
    [
        *("broadcast_in_dim", "concatenate", "copy", "reshape", "rev"),
        *("sharding_constraint", "squeeze", "stack", "transpose"),
    ]
)
# These pass elements on, and their transpose adds no cotangents: one operand, or each for itself.
PASSED = frozenset(
    [
        *("device_put", "name", "optimization_barrier", "reshard"),
        *("slice", "split", "stop_gradient", "unstack"),
    ]
)
LOOKUPS = frozenset(["dynamic_slice", "gather"])
# These only change the dtype, the device or the derivative.
CONVERSIONS = frozenset(["convert_element_type", "device_put", "stop_gradient"])
COMPARISONS = frozenset(["eq", "ge", "gt", "is_finite", "le", "lt", "ne"])
# Operations that are cheap to recompute. Reductions, matrix products, elementary functions, random
# numbers and collectives are not.
ARITHMETIC = (
    MOVES
    | CONVERSIONS
    | COMPARISONS
    | frozenset(
        [
            *("abs", "add", "add_any", "and", "bitcast_convert_type", "cbrt", "ceil", "clamp"),
            *("complex", "conj", "div", "floor", "imag"),
            *("integer_pow", "iota", "max", "min", "mul", "neg", "not", "one_minus_square", "or"),
            *("pad", "polynomial", "pvary", "real", "reduce_precision", "rem", "round"),
            *("rsqrt", "select_n", "sign", "slice", "split", "sqrt", "square"),
            *("sub", "tile", "unstack", "xor"),
        ]
    )
)
# Functions of one number, or of two, that are computed from series or tables.
ELEMENTARY = frozenset(
    [
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf"),
        *("erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "sin"),
        *("sinh", "tan", "tanh"),
    ]
)

"""The names of JAX's primitives: matrix products, calls, data movement and arithmetic.

They are the names in jax 0.7 to 0.12. No version has them all.
"""

CHECKPOINT_NAME = "name"
CONDITIONAL = "cond"
CONVERSION = "convert_element_type"
KERNEL = "pallas_call"
LINEAR_SOLVE = "custom_linear_solve"
SCAN = "scan"
SELECTION = "select_n"
STOP_GRADIENT = "stop_gradient"
WHILE = "while"

# Matrix products and convolutions, and the block-scaled product of `jax.nn.scaled_matmul`.
PRODUCT, CONVOLUTION = "dot_general", "conv_general_dilated"
PRODUCTS = frozenset([PRODUCT, "ragged_dot_general", CONVOLUTION])
SCALED_PRODUCT = "scaled_matmul_wrapper"

# These call a function once, with the operands. jax 0.12 renamed `closed_call` to `eval_jaxpr`.
PLAIN_CALLS = frozenset(["closed_call", "eval_jaxpr", "jit", "remat2"])
# The same for functions with a custom derivative.
CUSTOM_JVP, CUSTOM_VJP = "custom_jvp_call", "custom_vjp_call"
CUSTOM_DERIVATIVES = frozenset([CUSTOM_JVP, CUSTOM_VJP])
CALLS = PLAIN_CALLS | CUSTOM_DERIVATIVES
# These call a function on each device, with its shards of the operands.
SHARD_MAP = "shard_map"
DEVICE_MAPS = frozenset([SHARD_MAP, "xla_pmap"])

# These can take an operand in another dtype, and convert it in their function.
ENTERED = PLAIN_CALLS | {SHARD_MAP}

# Programs are edited inside the functions that these call.
FOLLOWED = PLAIN_CALLS | DEVICE_MAPS | {SCAN, CONDITIONAL}

# On the NaN of a skipped step, these may not return, or may have effects. LAPACK's
# routines for eigenvalues and singular values iterate until they converge.
LOOPS_AND_CALLBACKS = frozenset([WHILE, "eig", "eigh", "schur", "svd", "pure_callback", "ffi_call"])

# What runs a function several times.
LOOPS = frozenset([SCAN, WHILE])

# These overflow in float16 where float32 does not.
MULTIPLICATION, POWER, POWERS = "mul", "pow", frozenset(["integer_pow", "square"])
EXPONENTIALS = frozenset(["exp", "exp2"])
SUMS = frozenset(["cumsum", "reduce_sum"])
# By a difference from a maximum, an exponential is at most 1.
MAXIMUM, MAXIMUM_OF_ALL, SUBTRACTION = "max", "reduce_max", "sub"
NEGATION, POSITIVE = "neg", frozenset(["abs", "logistic"])


# These only move elements, if the result is as large as the operands: see `edits.is_move`.
MOVES = frozenset(
    [
        *("broadcast_in_dim", "concatenate", "copy", "reshape", "rev"),
        *("sharding_constraint", "squeeze", "stack", "transpose"),
    ]
)
# These pass elements on, and their transpose adds no cotangents: one operand, or each for itself.
PASSED = frozenset(
    [
        *("device_put", CHECKPOINT_NAME, "optimization_barrier", "reshard"),
        *("slice", "split", STOP_GRADIENT, "unstack"),
    ]
)
LOOKUPS = frozenset(["dynamic_slice", "gather"])
# These only change the dtype, the device or the derivative.
CONVERSIONS = frozenset([CONVERSION, "device_put", STOP_GRADIENT])
# Their results are complex, though their operands may be real.
MAKES_COMPLEX = frozenset(["complex", "eig", "fft"])
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
            *("rsqrt", SELECTION, "sign", "slice", "split", "sqrt", "square"),
            *("sub", "tile", "unstack", "xor"),
        ]
    )
)
# Slower than arithmetic: repeated only where that saves memory.
ELEMENTARY = frozenset(
    [
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf"),
        *("erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "sin"),
        *("sinh", "tan", "tanh"),
    ]
)

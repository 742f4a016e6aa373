"""The portion of a tensor that one program of a kernel works on, for kernels that read whole tensors."""

MEASURED = 1 << 15
"""Number of elements of a matrix that one program measures or rescales."""

LOOKED = 1 << 17
"""Number of elements of a gradient in which one program searches for a non-zero element."""

FIRST = 1 << 11
"""Number of elements that this program checks first. It stops if one is not zero, which is nearly always so."""

SMALL_ROWS, SMALL_COLS = 64, 128
"""The largest matrix that one program holds from its first step to its last, rows ≤ cols; more would leave its threads
without registers (docs/internals/kernels.md has the figures)."""

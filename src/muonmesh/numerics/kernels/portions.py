"""How much of a tensor one program of a kernel takes, for kernels that go through tensors from end to end."""

MEASURED = 1 << 15
"""Elements of a matrix that one program measures or rescales."""

LOOKED = 1 << 17
"""Elements of a gradient that one program is there for, to find one that is not zero."""

FIRST = 1 << 11
"""Elements that it looks at before it looks at more; where they are not all zero, which is nearly always, it stops."""

SMALL_ROWS, SMALL_COLS = 64, 128
"""The largest matrix that one program holds from its first step to its last, rows ≤ cols; more would leave its threads
without registers (docs/internals/kernels.md has the figures)."""

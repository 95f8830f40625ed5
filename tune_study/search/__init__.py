"""Which cells of a study to run when not all are: a search for edges and best learning rates.

    edge    one line's edge of stability: belief, and the next cell
    best    one line's lowest loss: the next cell
    rounds  all lines of a study: the next round, and what is known

No Ray and no files in here: cells in, cells out. docs/edge.md has the method and its error rates.
"""

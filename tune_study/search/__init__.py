"""Which cells of a study to run when not all are: a search for edges and best learning rates.

    edge    one line's edge of stability: belief, and the next cell
    best    one line's lowest loss: the next cell
    ends    how cells ended, and what is judged of them
    rounds  all lines of a study: the next round, and what is known
    course  a search as far as it has come, cell by cell
    cells   a study's cells as places of its search

No Ray and no files in here: cells in, cells out. docs/edge.md has the method and its error rates.
"""

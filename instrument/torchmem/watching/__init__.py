"""``torchmem watch``: the live view in a terminal of who holds the memory of this host's ranks.

    look        one reading of the directory, judged                     choice      what the user has chosen to see
    drawing     a reading as lines of a terminal                         rank_table  the pane of all ranks
    lines       what lines are made of                                   command     the command line
    app         the live view: keys, timers, panes

Invariants: nothing is written into the directory and no lock is held; text from a record is stripped of what could
drive a terminal; only ``app`` needs Textual. What is judged, and what is said of it, is the sidecar's.
"""

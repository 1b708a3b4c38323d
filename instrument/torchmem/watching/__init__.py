"""``torchmem watch``: the live view in a terminal of who holds the memory of this host's ranks.

    look        one reading of the directory, judged                     alerts      what a rank's reading warns of
    choice      what the user has chosen to see                          drawing     a reading as lines of a terminal
    lines       what lines are made of                                   rank_table  the pane of all ranks
    app         the live view: keys, timers, panes                       command     the command line

Invariants: nothing is written into the directory and no lock is held; text from a record is stripped of what could
drive a terminal; only ``app`` needs Textual, and only ``look`` and ``alerts`` know the sidecar's judgement.
"""

"""``torchmem forecast``: what each rank of a job will hold, before it starts and without its hardware.

``job`` runs the user's own model on fake tensors under the dispatch engine, ``outcome`` is what comes of it, ``advice``
says what would have to shrink, ``sweep`` varies an argument, ``show`` draws and ``command`` is the command line.
"""

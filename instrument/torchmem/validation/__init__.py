"""``torchmem validate``: every way people train, run on the user's own machine and checked against independent counts.

``rows`` says what there is, ``parallel`` and ``models`` how each workload is made, ``watch`` how one is compared with
the truth, ``worker`` where it runs, ``run`` in which order, ``report`` how it is shown.
"""

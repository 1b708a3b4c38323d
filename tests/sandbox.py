"""Restricts itself as a systemd unit would, then becomes another program: ``python sandbox.py SETTINGS COMMAND...``.

The settings are JSON: ``calls``, system calls that are allowed; ``families``, address families of sockets that are;
``no_written_code``, whether memory that was written may not be executed. All else gives EPERM.

Known limits: x86-64 and its like; needs no_new_privs set before, and libseccomp, which systemd itself needs.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys

_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | 1  # EPERM
_EQUAL = 4
_PR_SET_MDWE = 65


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def _restrict_calls(names, families):
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_REFUSE)))
    assert rules
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue  # of another architecture
        if name == "socket":
            comparisons = [_Comparison(0, _EQUAL, getattr(socket, family), 0) for family in families]
            rows = [(1, ctypes.byref(comparison)) for comparison in comparisons]
        else:
            rows = [(0, None)]
        for row in rows:
            done = library.seccomp_rule_add_array(rules, ctypes.c_uint32(_ALLOW), number, *row)
            assert done == 0, (name, done)
    assert library.seccomp_load(rules) == 0


def main():
    settings = json.loads(sys.argv[1])
    if settings["no_written_code"]:
        assert ctypes.CDLL(None).prctl(_PR_SET_MDWE, 1, 0, 0, 0) == 0, "needs Linux 6.3"
    _restrict_calls(settings["calls"], settings["families"])
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()

"""Work in threads that requests of the same kind share.

Invariant: while a piece of work runs, everybody who asks for the same gets its result; nothing is kept afterwards. A
shared result is therefore never from before the first of those requests, and for one that joins late it is at most as
old as the work takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SingleFlight(Generic[Result]):
    """Runs work in a pool, at most once at a time for each key; used in one event loop only.

    Args:
        pool: where the work runs.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._running: dict[Hashable, asyncio.Future[Result]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    async def run(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """The result of the work, or of the same work where that runs already.

        Raises:
            Exception: what the work raised.
        """
        future = self._running.get(key)
        if future is None:
            future = self._running[key] = asyncio.get_running_loop().run_in_executor(self._pool, work)
            future.add_done_callback(lambda done: self._landed(key, done))
        # One who gives up must not take the result away from the others.
        return await asyncio.shield(future)

    def _landed(self, key: Hashable, done: asyncio.Future[Result]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # looked at, so that asyncio does not complain where everybody has given up

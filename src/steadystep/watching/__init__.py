"""Guarding a loop that calls `backward` and `optimizer.step` itself."""

from steadystep.watching.watcher import Watcher, watch

__all__ = ["Watcher", "watch"]

"""What a spare process reserves once it has a device: Ray fixes the resources of an actor, and its GPUs, when the actor is made."""

from __future__ import annotations

import os


class Reservation:
    """An actor that holds the resources of a device, which another process uses. Its module loads nothing that takes time or memory."""

    def gpus(self) -> str:
        """Return the GPUs that Ray gave it, as CUDA_VISIBLE_DEVICES names them; empty without any."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

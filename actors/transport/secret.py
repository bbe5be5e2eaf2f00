"""The secret of a run, by which its processes know each other: what they prove with it, and where their store is.

A proof is an HMAC (RFC 2104) with SHA-256 of what both ends have just chosen at random, so a recorded one proves nothing later.
Nothing is encrypted: who can read the network between the nodes reads the messages.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass, field

NUM_BYTES = 32
"""Of a secret, of a random challenge and of a proof."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Secret:
    """Bytes that only the processes of a run have; the driver makes them, and Ray hands them out. They are in no text of an error."""

    key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """Make a secret of random bytes of the operating system."""
        return cls(secrets.token_bytes(NUM_BYTES))

    def proof(self, *parts: bytes) -> bytes:
        """Return the proof of knowing the secret for these parts, in this order."""
        return hmac.digest(self.key, b"".join(_LENGTH.pack(len(part)) + part for part in parts), "sha256")

    def proves(self, proof: bytes, *parts: bytes) -> bool:
        """Return whether a proof is that of the parts, in a time that does not depend on where it differs."""
        return hmac.compare_digest(proof, self.proof(*parts))


@dataclass(frozen=True)
class StoreAddress:
    """Where the processes of a run meet, and the secret that they prove to know there."""

    host: str
    port: int
    secret: Secret = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

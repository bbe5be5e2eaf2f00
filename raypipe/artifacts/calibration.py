"""What a machine's runs cost besides computation: `raypipe.calibration/1`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar

from raypipe.artifacts import codec
from raypipe.artifacts.topology import NodeLink, Overheads
from raypipe.errors import FormatError, suggestion

FORMAT = "raypipe.calibration/1"


@dataclass(frozen=True, kw_only=True)
class TransportCosts:
    """What passing messages between the devices of one node costs over one transport.

    Attributes:
        overheads: of each device.
        link: between two devices.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = codec.config()

    overheads: Overheads
    link: NodeLink


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The costs of one machine.

    Attributes:
        host: its name.
        date: of the measurement.
        versions: of what was measured: python, torch, ray, raypipe.
        transports: the costs by transport, such as `shm`.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = codec.config()

    host: str
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    transports: dict[str, TransportCosts]

    def of(self, transport: str) -> TransportCosts:
        """The costs over one transport.

        Raises:
            FormatError: it was not measured.
        """
        try:
            return self.transports[transport]
        except KeyError:
            known = suggestion(transport, self.transports)
            raise codec.invalid(self, "transports", f"has no {transport!r}{known}; run `raypipe calibrate` again") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """The calibration that a JSON file holds.

        Raises:
            FormatError: says what is wrong with the file, and where.
        """
        if not os.path.exists(path):
            raise FormatError(os.fspath(path), "", "there is no such file; `raypipe calibrate` writes one")
        return codec.from_json(cls, codec.read_text(path), path=os.fspath(path), format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file."""
        codec.write_text(path, codec.to_json(self, format_name=FORMAT))

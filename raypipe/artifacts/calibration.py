"""What a machine's runs cost besides computation: `raypipe.calibration/1`."""

from __future__ import annotations

import os
from dataclasses import field

from raypipe.artifacts import codec
from raypipe.artifacts.record import invalid, record
from raypipe.artifacts.topology import NodeLink, Overheads
from raypipe.errors import FormatError, suggestion

FORMAT = "raypipe.calibration/1"


@record()
class TransportCosts:
    """What passing messages between the devices of one node costs over one transport.

    Attributes:
        overheads: of each device.
        link: between two devices.
    """

    overheads: Overheads
    link: NodeLink


@record()
class Calibration:
    """The costs of one machine.

    Attributes:
        host: its name.
        date: of the measurement.
        versions: of what was measured: python, torch, ray, raypipe.
        transports: the costs by transport, such as `shm`.
    """

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
            raise invalid(self, "transports", f"has no {transport!r}{known}; run `raypipe calibrate` again") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """The calibration that a JSON file holds.

        Raises:
            FormatError: says what is wrong with the file, and where.
        """
        if not os.path.exists(path):
            raise FormatError(os.fspath(path), "", "there is no such file; `raypipe calibrate` writes one")
        return codec.load_json(cls, path, format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file."""
        codec.save_json(self, path, format_name=FORMAT)

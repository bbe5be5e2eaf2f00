"""The costs of a machine's runs besides computation: `raypipe.calibration/1`."""

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
    """The costs of messages between the devices of one node over one transport.

    Attributes:
        overheads: Overheads of each device.
        link: Link between two devices.
    """

    overheads: Overheads
    link: NodeLink


@record()
class Calibration:
    """The costs of one machine.

    Attributes:
        host: Name of the machine.
        date: Date of the measurement.
        versions: Versions of python, torch, ray and raypipe.
        transports: Costs by transport, such as `shm`.
    """

    host: str
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    transports: dict[str, TransportCosts]

    def of(self, transport: str) -> TransportCosts:
        """Return the costs of one transport.

        Raises:
            FormatError: The transport was not measured.
        """
        try:
            return self.transports[transport]
        except KeyError:
            known = suggestion(transport, self.transports)
            raise invalid(self, "transports", f"has no {transport!r}{known}; run `raypipe calibrate` again") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Return the calibration that a JSON file holds.

        Raises:
            FormatError: The file cannot be read.
        """
        if not os.path.exists(path):
            raise FormatError(os.fspath(path), "", "there is no such file; `raypipe calibrate` writes one")
        return codec.load_json(cls, path, format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a JSON file."""
        codec.save_json(self, path, format_name=FORMAT)

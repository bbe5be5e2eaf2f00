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
    """Costs of messages between devices of one node."""

    overheads: Overheads
    link: NodeLink


@record()
class Calibration:
    """Costs of one machine, by transport such as `shm`."""

    host: str
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    transports: dict[str, TransportCosts]

    def of(self, transport: str) -> TransportCosts:
        """Return the costs of one transport; raise `FormatError` if it was not measured."""
        try:
            return self.transports[transport]
        except KeyError:
            known = suggestion(transport, self.transports)
            raise invalid(self, "transports", f"has no {transport!r}{known}; run `raypipe calibrate` again") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Return the calibration in a JSON file, or raise `FormatError`."""
        if not os.path.exists(path):
            raise FormatError(os.fspath(path), "", "there is no such file; `raypipe calibrate` writes one")
        return codec.load_json(cls, path, format_name=FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a JSON file."""
        codec.save_json(self, path, format_name=FORMAT)

"""The tensors that are on their way between stages in one window."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from raypipe.actors.execution.steps import MessageKey, OutgoingMessage, ReceiveStep, Rows, StageOutput
from raypipe.actors.transport.protocol import Transport


class Mailbox:
    """What stages of this device have received and not yet used, and what they give to other devices."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.inbox: dict[MessageKey, list[tuple[Rows, tuple[Tensor, ...]]]] = {}
        self.outbox: dict[MessageKey, tuple[Tensor, ...]] = {}

    def put(self, output: StageOutput, rows: Rows, tensors: tuple[Tensor, ...]) -> None:
        """Put a stage's output where the other stage finds it: on this device, or for the sends of this step."""
        if output.local:
            self.inbox[output.key] = [(rows, tuple([tensor.detach() for tensor in tensors]))]
        else:
            self.outbox[output.key] = tensors

    def take(self, key: MessageKey) -> tuple[Tensor, ...]:
        """Return the tensors that a stage gets from another one, joined where their rows came in several messages."""
        pieces = self.inbox.pop(key)
        if len(pieces) == 1:
            return pieces[0][1]
        pieces.sort(key=itemgetter(0))
        return tuple(torch.cat(parts) for parts in zip(*(tensors for _, tensors in pieces), strict=True))

    def receive(self, step: ReceiveStep) -> None:
        """Wait for a message."""
        piece = (step.message.rows, self._transport.recv(step.message, step.device))
        pieces = self.inbox.setdefault(step.key, [piece])
        if pieces[0] is not piece:
            pieces.append(piece)

    def send(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send what the Ops of a step have put."""
        for outgoing in messages:
            tensors = self.outbox[outgoing.key]
            if outgoing.rows is not None:
                first, end = outgoing.rows
                tensors = tuple(tensor[first:end] for tensor in tensors)
            self._transport.send(outgoing.message, outgoing.device, tensors)
        self.outbox.clear()

"""Small models of transformers, random or in folders, their rows, and transformers' own training of them in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raypipe.actors.local import LocalPipeline
from raypipe.model import Batch, Model

VOCABULARY, LENGTH, ROWS = 61, 12, 2
IGNORED = -100

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_config(family: str, **values: Any) -> Any:
    """Return the configuration of a small model; windows and the like are shorter than the rows, so that they matter."""
    from transformers import AutoConfig

    sizes = {**SIZES, "head_dim": 8, "attention_dropout": 0.0, **values}
    if family in {"gpt2", "opt", "bert", "roberta", "xlm-roberta", "camembert", "electra"}:
        dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout")
        sizes = {**{name: sizes[name] for name in sizes if name not in {"head_dim", "num_key_value_heads"}}, **dict.fromkeys(dropouts, 0.0)}
    return AutoConfig.for_model(family, **sizes)


def save(config: Any, folder: Path, *, kind: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> str:
    """Write a model with random weights into a folder, as transformers does."""
    import transformers

    kind = kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(7)
    model = kind(config).to(dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms and biases begin as ones and zeros, with which a mistake may go unseen
            nn.init.normal_(weight, mean=float("norm" in name or "ln_" in name), std=0.1)
    model.save_pretrained(folder, **options)
    return str(folder)


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute in float64 what they would round to float32, such as norms: both sides are then equal to the last digits."""
    convert = torch.Tensor.to

    def to(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        rounds = tensor.dtype == torch.float64 and torch.float32 in {*arguments, *keywords.values()}
        return tensor if rounds else convert(tensor, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: to(tensor, torch.float32))


@dataclass(frozen=True)
class TextRows:
    """Rows of random tokens with their labels, a function of the microbatch's number.

    Attributes:
        padded: Whether rows end in padding: then microbatches have different numbers of labels.
        packed: Whether rows hold two texts each, told apart by their positions.
        masked: Whether labels are those of a masked language model.
    """

    padded: bool = False
    packed: bool = False
    masked: bool = False

    def batch(self, microbatch: int, rows: tuple[float, float]) -> Batch:
        generator = torch.Generator().manual_seed(100 + microbatch)
        tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        fields = {"input_ids": tokens, "labels": tokens.clone()}
        if self.masked:
            hidden = torch.rand(tokens.shape, generator=generator) < 0.4
            fields["labels"][~hidden] = IGNORED
            fields["labels"][:, 0] = tokens[:, 0]
            tokens[hidden] = 3
        if self.padded:
            # By less than a window: a position that sees padding alone is no number in transformers, and makes others none.
            ends = torch.randint(LENGTH - 3, LENGTH + 1, (ROWS, 1), generator=generator)
            there = torch.arange(LENGTH) < ends
            fields["attention_mask"] = there.long()
            fields["labels"][~there] = IGNORED
            tokens[~there] = 0
        if self.packed:
            cut = int(torch.randint(3, LENGTH - 3, (), generator=generator))
            fields["position_ids"] = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).expand(ROWS, -1)
        first, end = (round(share * ROWS) for share in rows)
        return {name: tensor[first:end] for name, tensor in fields.items()}


def train_with_transformers(
    folder: str,
    batches: TextRows,
    *,
    num_updates: int,
    num_microbatches: int,
    learning_rate: float,
    weight_decay: float = 0.01,
    kind: Any = None,
    ahead: int = 1,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of AdamW on the model of a folder: all rows of an update at once, the mean over its labels, in float64."""
    import transformers

    model = (kind or transformers.AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float64)
    losses = train_whole(
        model,
        batches,
        num_updates=num_updates,
        num_microbatches=num_microbatches,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        ahead=ahead,
    )
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def train_whole(
    model: Any,
    batches: TextRows,
    *,
    num_updates: int,
    num_microbatches: int,
    learning_rate: float,
    weight_decay: float = 0.01,
    ahead: int = 1,
) -> list[float]:
    """Train a model of transformers or PEFT as `train_with_transformers` says; return the losses."""
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
    losses = []
    for update in range(num_updates):
        parts = [batches.batch(update * num_microbatches + number, (0.0, 1.0)) for number in range(num_microbatches)]
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        labels = functional.pad(rows.pop("labels"), (0, ahead), value=IGNORED)[:, ahead:]
        logits = model(**rows, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights_of(pipeline: LocalPipeline) -> dict[str, Tensor]:
    """Return the weights that the devices of a pipeline hold, by the names that transformers gives them."""
    return {
        weight: tensor
        for on_device in pipeline.weights
        for stage in on_device.values()
        for layer in stage.module.layers.values()
        for weight, tensor in layer.state_dict().items()
    }


def logits_by_layers(model: Model, batch: Batch, *, seed: int = 0) -> Tensor:
    """Return the logits of all layers, one after another."""
    from tests.actors.oracles import unsplit

    hidden: tuple[Tensor, ...] = ()
    fields = {name: tensor for name, tensor in batch.items() if name not in {"labels", "targets"}}
    with torch.no_grad():
        for module in unsplit(model, seed=seed).eval():
            hidden = (module(*hidden, **fields),)
    return hidden[0]

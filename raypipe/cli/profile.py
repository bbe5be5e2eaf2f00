"""Command `raypipe profile`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raypipe.artifacts.profile import ModelProfile
from raypipe.cli.options import COUNT, FiniteRange, check_output, example, json_option
from raypipe.cli.screen import console, notice, print_json
from raypipe.cluster.signals import put_off
from raypipe.config import TrainConfig
from raypipe.errors import visible
from raypipe.profiling.linearize import Chain, finer_chains, linearize
from raypipe.profiling.pipedream import WEIGHT_GRAD_SHARE, read_pipedream
from raypipe.profiling.sailor import SailorData
from raypipe.show.report import Figure, Report, rows_table
from raypipe.show.tables import layer_report
from raypipe.units import counted, ratio, seconds, size

if TYPE_CHECKING:
    from raypipe.profiling.profiler import Measured

_LARGE_SPREAD = 0.1
_LARGE_SHARE = 0.01  # layers that take less of the model's time may vary as they like
_MUCH_SHORTER = 0.8  # part of its length that the longest layer should have in another chain, to be worth a word
# Options that only some sources of a profile have a use for.
_SOURCES = {
    "a measurement": ("overrides", "device_kinds", "address", "repeats", "passes", "at_once"),
    "--from-pipedream": ("microbatch_size", "weight_grad_share", "name"),
    "--from-sailor": ("microbatch_size", "weight_grad_share", "name", "model", "tensor_parallel", "gpu"),
}


@dataclass(frozen=True)
class _Result:
    profile: ModelProfile
    chain: Chain | None
    kinds: tuple[Measured, ...] = ()
    spreads: tuple[tuple[float, ...], ...] = ()  # of the profile's layers, for each of `kinds`
    warnings: tuple[str, ...] = ()


@click.command(
    epilog=example(
        "raypipe profile examples/gpt_python_stdlib.yaml -o profile.json",
        "raypipe profile config.yaml --device-kinds cpu-fast=10.0.0.1,cpu-slow=10.0.0.3 -o profile.json",
        "raypipe profile --from-pipedream vgg16.graph.txt --microbatch-size 128 --chain -o profile.json",
        "raypipe profile --from-sailor measured --model OPT-350 --microbatch-size 8 --tensor-parallel 4 -o profile.json",
    )
)
@click.argument("config", required=False, type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), metavar="FILE", help="File to write the profile to (.json).")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value of CONFIG; can be given several times.")
@click.option(
    "--device-kinds",
    metavar="KIND[=NODE],...",
    help="Measure one device of each kind, on the node with this label, address or host name; the times of the first kind count for "
    "kinds that are not listed.  "
    "[default: the cluster's first device stands for all]",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Address of a running Ray cluster.  [default: cluster.address of CONFIG, RAY_ADDRESS, or a local cluster]",
)
@click.option("--repeats", type=click.IntRange(2, 10**6), default=7, help="Number of timed runs of each layer in a pass.")
@click.option("--passes", type=click.IntRange(1, 10**6), default=3, help="Number of passes over all layers.")
@click.option(
    "--at-once",
    type=COUNT,
    default=1,
    help="Number of devices of a node that measure at the same time, so that they slow each other as in training.",
)
@click.option(
    "--from-pipedream", type=click.Path(), metavar="FILE", help="Convert this profile of PipeDream (graph.txt) in place of a measurement."
)
@click.option(
    "--from-sailor", type=click.Path(), metavar="FOLDER", help="Convert a profile of this folder of Sailor's in place of a measurement."
)
@click.option(
    "--microbatch-size",
    type=COUNT,
    help="Number of rows in the microbatch that was measured: PipeDream's file does not say it, Sailor's have several.",
)
@click.option(
    "--weight-grad-share",
    type=FiniteRange(0, 1),
    default=WEIGHT_GRAD_SHARE,
    help="Of a converted profile, share of the backward that computes the gradient of the weights, in layers with weights.",
)
@click.option("--name", help="Name of a converted profile.  [default: name of the file or the model]")
@click.option("--model", help="With --from-sailor, name of the model in its files.")
@click.option("--tensor-parallel", type=COUNT, default=1, help="With --from-sailor, number of GPUs that are one device together.")
@click.option(
    "--gpu", help="With --from-sailor, kind of GPU whose times the layers have; others are kept beside them.  [default: the first measured]"
)
@click.option("--chain", is_flag=True, help="Merge parallel branches, so that the layers are a chain.")
@click.option("--max-crossing", type=COUNT, default=1, help="With --chain, largest number of tensors between two layers of the chain.")
@json_option
@click.pass_context
def profile(
    context: click.Context,
    *,
    config: str | None,
    output: str,
    overrides: tuple[str, ...],
    device_kinds: str | None,
    address: str | None,
    repeats: int,
    passes: int,
    at_once: int,
    from_pipedream: str | None,
    from_sailor: str | None,
    microbatch_size: int | None,
    weight_grad_share: float,
    name: str | None,
    model: str | None,
    tensor_parallel: int,
    gpu: str | None,
    chain: bool,
    max_crossing: int,
    as_json: bool,
) -> None:
    """Measure what each layer of a model costs: times, and bytes passed on, kept and held as weights.

    CONFIG is the YAML file of a training run. A device of its Ray cluster builds one layer after the other and runs it with a
    microbatch, so that no device needs to hold the model. Profiles of PipeDream and Sailor are read with --from-pipedream and
    --from-sailor.
    """
    _check_options(context, config)
    check_output(output, config, from_pipedream, suffixes=["json"])
    most = max_crossing if chain else None
    if from_pipedream is not None:
        assert microbatch_size is not None, "checked with the options"
        read = read_pipedream(from_pipedream, microbatch_size=microbatch_size, weight_grad_share=weight_grad_share, name=name)
        result = _result(read, most)
    elif from_sailor is not None:
        assert microbatch_size is not None, "checked with the options"
        assert model is not None, "checked with the options"
        read = SailorData(Path(from_sailor)).profile(
            model,
            microbatch_size=microbatch_size,
            tensor_parallel=tensor_parallel,
            gpu=gpu,
            weight_grad_share=weight_grad_share,
            name=name,
        )
        result = _result(read, most)
    else:
        assert config is not None, "checked with the options"
        loaded = _configured(config, overrides, address, as_json=as_json)
        result = _measured(loaded, device_kinds, repeats=repeats, passes=passes, at_once=at_once, max_tensors=most)
    result.profile.save(output)
    if as_json:
        print_json(_report(result, output).document())
    else:
        _show(result, output)
    for warning in result.warnings:
        click.echo(visible(f"warning: {warning}"), err=True)


def _check_options(context: click.Context, config: str | None) -> None:
    params = context.params
    sources = [config, params["from_pipedream"], params["from_sailor"]]
    if sum(source is not None for source in sources) != 1:
        problem = "give either CONFIG, to measure its model, or --from-pipedream FILE, or --from-sailor FOLDER"
        raise click.UsageError(problem, context)
    chosen = next(name for name, source in zip(_SOURCES, sources, strict=True) if source is not None)
    if config is None and params["microbatch_size"] is None:
        raise click.UsageError(f"{chosen} needs --microbatch-size: the number of rows in the microbatch that was measured", context)
    if params["from_sailor"] is not None and params["model"] is None:
        raise click.UsageError("--from-sailor needs --model: its files have several models", context)
    given = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    }
    if "max_crossing" in given and not params["chain"]:
        raise click.UsageError("--max-crossing can be used with --chain only", context)
    of_sources = dict.fromkeys(name for names in _SOURCES.values() for name in names)
    for option in of_sources:
        if option in given and option not in _SOURCES[chosen]:
            having = " or ".join(source for source, names in _SOURCES.items() if option in names)
            raise click.UsageError(f"{given[option]} can be used with {having} only", context)


def _configured(config: str, overrides: Sequence[str], address: str | None, *, as_json: bool) -> TrainConfig:
    loaded = TrainConfig.load(config, overrides=overrides)
    cluster = dataclasses.replace(loaded.cluster, dashboard=False)
    if address is not None:
        cluster = dataclasses.replace(cluster, address=address)
    if as_json:  # what actors print would come between
        cluster = dataclasses.replace(cluster, log_to_driver=False)
    return dataclasses.replace(loaded, cluster=cluster)


def _result(profile: ModelProfile, max_tensors: int | None, kinds: tuple[Measured, ...] = (), warnings: tuple[str, ...] = ()) -> _Result:
    if max_tensors is None:
        return _Result(profile, None, kinds, tuple(kind.spreads for kind in kinds), warnings)
    chain = linearize(profile, max_tensors=max_tensors)
    coarse = _coarse(profile, chain, max_tensors)
    return _Result(chain.profile, chain, kinds, tuple(kind.merged_spreads(chain.members) for kind in kinds), (*warnings, *coarse))


def _coarse(profile: ModelProfile, chain: Chain, max_tensors: int) -> list[str]:
    """Say that a chain keeps few devices busy, where another one would keep more."""
    finer = finer_chains(profile, chain, max_tensors=max_tensors)
    if not finer or min(other.longest_share for other in finer.values()) > _MUCH_SHORTER * chain.longest_share:
        return []
    others = [f"{number}: {counted(other.profile.num_layers, 'layer')}, {ratio(other.longest_share)}" for number, other in finer.items()]
    return [
        f"the longest of the {counted(chain.profile.num_layers, 'layer')} of this chain takes {ratio(chain.longest_share)} of the time, "
        f"so that a pipeline is at most {1 / chain.longest_share:.3g} times as fast as one device; more places to cut, "
        f"with --max-crossing {'; '.join(others)}"
    ]


def _measured(
    config: TrainConfig, device_kinds: str | None, *, repeats: int, passes: int, at_once: int, max_tensors: int | None
) -> _Result:
    with put_off():
        from raypipe.actors.measure.layer_costs import Effort  # noqa: PLC0415  # loads torch: not before the configuration is known to be good
        from raypipe.profiling.profiler import DeviceKind, profile_model  # noqa: PLC0415

    logging.getLogger("ray").setLevel(logging.WARNING)
    kinds = [DeviceKind.of(text.strip()) for text in device_kinds.split(",")] if device_kinds else []
    profiled = profile_model(config, kinds=kinds, effort=Effort(repeats=repeats, passes=passes), num_at_once=at_once, notice=notice)
    warnings = [warning for kind in profiled.kinds if (warning := _warning(kind, profiled.profile, repeats=repeats, passes=passes))]
    return _result(profiled.profile, max_tensors, profiled.kinds, tuple(warnings))


def _warning(measured: Measured, profile: ModelProfile, *, repeats: int, passes: int) -> str:
    took = [times.forward_s + times.backward_s for times in measured.times]
    restless = [
        (layer.name, spread)
        for layer, spread, took_s in zip(profile.layers, measured.spreads, took, strict=True)
        if spread > _LARGE_SPREAD and took_s >= _LARGE_SHARE * sum(took)
    ]
    if not restless:
        return ""
    worst, spread = max(restless, key=lambda pair: pair[1])
    return (
        f"on {measured.device} ({measured.kind}) the times of {counted(len(restless), 'layer')} vary by more than {_LARGE_SPREAD:.0%}, "
        f"most those of {worst!r}: by {spread:.0%} each way. Something else is at work there: end it and measure again, "
        f"or take more runs (--repeats, now {repeats}; --passes, now {passes})"
    )


def _report(result: _Result, output: str) -> Report:
    profile, chain = result.profile, result.chain
    of_kinds = [
        Figure(
            measured.kind,
            Report(
                Figure("device", measured.device),
                Figure(
                    "layers",
                    [
                        dataclasses.asdict(times) | {"spread": spread}
                        for times, spread in zip(profile.for_kind(measured.kind), spreads, strict=True)
                    ],
                ),
            ),
        )
        for measured, spreads in zip(result.kinds, result.spreads, strict=True)
    ]
    merged = chain and Report(Figure("members", [list(group) for group in chain.members]), Figure("num_tensors", list(chain.num_tensors)))
    return Report(
        Figure("file", output),
        Figure("name", profile.name),
        Figure("microbatch_size", profile.microbatch_size),
        Figure("num_layers", profile.num_layers),
        Figure("layers", _layer_reports(result)),
        Figure("device_kinds", Report(*of_kinds)),
        Figure("warnings", list(result.warnings)),
        *([Figure("chain", merged)] if merged else []),
    )


def _layer_reports(result: _Result) -> list[Report]:
    layers = result.profile.layers
    spreads = result.spreads[0] if result.spreads else (None,) * len(layers)
    crossing = [[Figure("", number, "tensors")] for number in (*result.chain.num_tensors, 0)] if result.chain else [[]] * len(layers)
    return [
        layer_report(layer, Figure("spread", spread, "spread", lambda share: f"+-{ratio(share)}"), *tensors)
        for layer, spread, tensors in zip(layers, spreads, crossing, strict=True)
    ]


def _show(result: _Result, output: str) -> None:
    profile, screen = result.profile, console()
    screen.print(rows_table(_layer_reports(result)))
    screen.print()
    for measured in result.kinds[1:]:
        times = profile.for_kind(measured.kind)
        ratios = sorted(
            (slow.forward_s + slow.backward_s) / (layer.forward_s + layer.backward_s)
            for slow, layer in zip(times, profile.layers, strict=True)
            if layer.forward_s + layer.backward_s
        )
        if ratios:
            screen.print(f"{measured.kind} ({measured.device}): layers take x{ratios[0]:.2f} to x{ratios[-1]:.2f} of the times above")
    total_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    shape = "a chain" if profile.named_edges is None else f"{counted(len(profile.named_edges), 'edge')}"
    copies_bytes = sum(layer.low_precision_bytes or 0 for layer in profile.layers)
    copies = f", {size(copies_bytes)} of copies in low precision" if copies_bytes else ""
    screen.print(
        f"{counted(profile.num_layers, 'layer')} ({shape}), {counted(profile.microbatch_size, 'row')} a microbatch: "
        f"{seconds(total_s)} forward and backward, {size(sum(layer.parameter_bytes for layer in profile.layers))} of weights{copies}"
    )
    screen.print(f"written to {output}", soft_wrap=True)

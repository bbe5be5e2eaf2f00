"""How long the first update takes to come: a plain process that builds a model and steps once, against `raypipe`, both from their start.

python benchmarks/first_update.py [--json FILE]            # 135 M parameters in 30 equal blocks on 4 stages; some minutes
python benchmarks/first_update.py --model data/smollm2     # a folder of transformers, with its weights
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rounds import write_json

ROOT = Path(__file__).resolve().parents[1]

PLAIN = """
import json, sys
s = json.loads(sys.argv[1])
sys.path.insert(0, s["examples"])
import torch
from raypipe.models.gpt import cross_entropy
from raypipe.user_code import make_model
torch.set_num_threads(s["threads"])
model = make_model(s["examples"] + "/llama.py:llama", s["options"])
layers = [layer.build() for layer in model.layers]
layers[-1].logits.weight = layers[0].token.weight
weights = list(dict.fromkeys(weight for layer in layers for weight in layer.parameters()))
optimizer = torch.optim.AdamW(weights, lr=1e-3)
for number in range(s["microbatches"]):
    rows = torch.randint(s["vocabulary"], (s["rows"], s["length"] + 1), generator=torch.Generator().manual_seed(number))
    x = rows[:, :-1]
    for layer in layers:
        x = layer(x)
    (cross_entropy(x, {"targets": rows[:, 1:]}) / s["microbatches"]).backward()
torch.nn.utils.clip_grad_norm_(weights, 1.0)
optimizer.step()
"""

PLAIN_LOADED = """
import json, sys
s = json.loads(sys.argv[1])
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(s["threads"])
model = AutoModelForCausalLM.from_pretrained(s["folder"], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for number in range(s["microbatches"]):
    rows = torch.randint(s["vocabulary"], (s["rows"], s["length"]), generator=torch.Generator().manual_seed(number))
    (model(input_ids=rows, labels=rows).loss / s["microbatches"]).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""

RAYPIPE = """
import json, sys, time
s = json.loads(sys.argv[1])
sys.path.insert(0, s["examples"])
import torch
import raypipe

class Rows:
    def batch(self, microbatch, rows):
        first, end = (round(s["rows"] * share) for share in rows)
        made = torch.randint(s["vocabulary"], (s["rows"], s["length"] + 1), generator=torch.Generator().manual_seed(microbatch))[first:end]
        return {"tokens": made[:, :-1].contiguous(), "targets": made[:, 1:].contiguous()}

class First(raypipe.Callback):
    def on_notice(self, text):
        print(f"{time.time() - s['began']:6.1f} s  {text}", file=sys.stderr, flush=True)

    def on_window(self, run, window):
        print(time.time() - s["began"], window.loss, flush=True)
        run.stop("that was it")

raypipe.Trainer(
    "hf:" + s["folder"] if s["folder"] else s["examples"] + "/llama.py:llama",
    model_options={} if s["folder"] else s["options"],
    batches=lambda split: Rows(),
    schedule_config=raypipe.ScheduleConfig(num_microbatches=s["microbatches"], microbatch_size=s["rows"], updates_per_window=1),
    scaling_config=raypipe.ScalingConfig(num_devices=s["devices"], profile=s["profile"]),
    run_config=raypipe.RunConfig(storage_path=s["storage"], num_updates=2, checkpoint_every_s=0.0, show_progress=False),
    callbacks=[First()],
).fit()
"""


def main() -> None:
    """Measure both, and print seconds and their ratio."""
    parser = argparse.ArgumentParser(description="Seconds until the first update.")
    parser.add_argument("--num-layers", type=int, default=30)
    parser.add_argument("--d-model", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--model", metavar="FOLDER", help="a model of transformers in place of one of the sizes above")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    options = {
        "vocabulary_size": arguments.vocabulary,
        "num_layers": arguments.num_layers,
        "d_model": arguments.d_model,
        "num_heads": 9,
        "num_groups": 3,
        "d_hidden": arguments.d_model * 8 // 3,
    }
    sizes = {name: getattr(arguments, name) for name in ("vocabulary", "microbatches", "rows", "length", "devices")}
    folder_of_model = os.path.abspath(arguments.model) if arguments.model else ""
    common = {"examples": str(ROOT / "examples"), "folder": folder_of_model, "options": options, "threads": os.cpu_count(), **sizes}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        began = time.time()
        subprocess.run([sys.executable, "-c", PLAIN_LOADED if folder_of_model else PLAIN, json.dumps(common)], check=True)
        plain_s = time.time() - began
        print(f"plain process: {plain_s:.1f} s", flush=True)
        results = {"plain_s": plain_s}
        for name, profile in (("first run", None), ("second run, layers known", None), ("estimated", "estimated")):
            began = time.time()
            settings = json.dumps(common | {"began": began, "profile": profile, "storage": str(Path(folder, "runs"))})
            output = subprocess.run([sys.executable, "-c", RAYPIPE, settings], check=True, stdout=subprocess.PIPE, text=True).stdout
            taken_s, loss = map(float, output.split()[:2])
            results[name] = taken_s
            print(f"raypipe, {name}: {taken_s:.1f} s, {taken_s / plain_s:.2f} times the plain process (loss {loss:.3f})", flush=True)
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()

"""Tokens per second of our flat GPT against transformers' GPT2LMHeadModel: same sizes, dtype, threads and AdamW.

One process. Both models live side by side and take turns, so that a busy machine slows both alike; printed are the
medians and the ratio (above 1: ours is faster). Ours is the whole training step: DeepSpeed's engine, ZeRO included.

    python tests/bench/bench_gpt2.py [--hidden 384 --layers 6 ... --precision bf16 --zero 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ds_vcycle import parallel, random_states
from ds_vcycle.config import RunConfig, parse_config
from ds_vcycle.levels import resolve_levels
from ds_vcycle.model.build import build_model
from ds_vcycle.train.engine import build_engine, set_lr

Step = Callable[[torch.Tensor], float]


def main() -> None:
    """Build both, warm up, alternate, print."""
    options = _options()
    torch.set_num_threads(options.threads)
    device = parallel.init_distributed(options.device)
    steps = {"ds-vcycle": _ours(options), "transformers": _theirs(options, device)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    batches = [_batch(options, device, number) for number in range(options.steps)]
    for round_number in range(options.rounds + 1):
        for name, step in steps.items() if round_number % 2 else reversed(steps.items()):
            begin = time.perf_counter()
            for batch in batches:
                step(batch)
            if round_number:  # the first is warm-up
                seconds[name].append(time.perf_counter() - begin)
    _report(options, seconds, {name: step(batches[0]) for name, step in steps.items()})
    parallel.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 6, "hidden": 384, "heads": 6, "sequence": 256, "vocab": 8192, "batch": 4}
    for name, value in (sizes | {"threads": 2, "rounds": 9, "steps": 3, "zero": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


def _batch(options: argparse.Namespace, device: torch.device, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(options.vocab, (options.batch, options.sequence + 1), generator=generator).to(device)


def _config(options: argparse.Namespace) -> RunConfig:
    model = {
        "architecture": "gpt",
        "layers": options.layers,
        "hidden": options.hidden,
        "heads": options.heads,
        "sequence_length": options.sequence,
        "vocab_size": options.vocab,
        "dropout": options.dropout,
        "attention_dropout": options.dropout,
    }
    training = {
        "global_batch": options.batch,
        "micro_batch": options.batch,
        "zero_stage": options.zero,
        "precision": options.precision,
        "device": options.device,
    }
    tree = {"model": model, "training": training, "data": {"path": "unused"}, "cycle": {"kind": "flat"}}
    return parse_config(tree | {"optimizer": {"grad_clip": 1.0}})


def _ours(options: argparse.Namespace) -> Step:
    config = _config(options)
    (level,) = resolve_levels(config)
    mesh = parallel.mesh_for(1)
    random_states.seed_ranks(1, mesh)
    module = build_model(level, config.model, mesh=mesh, seed=1)
    engine = build_engine(module, level, config, mesh)
    set_lr(engine, 1e-4)
    weights = torch.ones(options.batch, options.sequence, device=mesh.device)

    def step(batch: torch.Tensor) -> float:
        lm_sum, _ = engine(tokens=batch[:, :-1], labels=batch[:, 1:], weights=weights)
        loss = lm_sum / weights.numel()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _theirs(options: argparse.Namespace, device: torch.device) -> Step:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=options.vocab, n_positions=options.sequence, n_embd=options.hidden, n_layer=options.layers,
        n_head=options.heads, activation_function="gelu", attn_pdrop=options.dropout, resid_pdrop=options.dropout,
        embd_pdrop=options.dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    model = GPT2LMHeadModel(config).to(device=device, dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(batch: torch.Tensor) -> float:
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _report(options: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, float]) -> None:
    tokens = options.batch * options.sequence * options.steps
    rate = {name: [tokens / value for value in values] for name, values in seconds.items()}
    settings = ", ".join(f"{name} {value}" for name, value in vars(options).items())
    print(f"{settings}, torch {torch.__version__}")
    for name, values in rate.items():
        print(f"{name:>14}: {statistics.median(values):9.0f} tokens/s (loss {losses[name]:.3f})")
    ratios = [ours / theirs for ours, theirs in zip(rate["ds-vcycle"], rate["transformers"])]
    middle = statistics.median(ratios)
    print(f"ratio ds-vcycle / transformers: {middle:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

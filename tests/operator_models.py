"""Megatron models filled with given weights, for the operators' tests: logits and Adam's moments of both levels."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_vcycle.model.build import build_model
from ds_vcycle.parallel import init_distributed, mesh_for, shutdown
from ds_vcycle.schema import parameters
from tests.operator_cases import config_for


def single_process():
    """Generator for a fixture: a process group of one, left alone if somebody else's is there."""
    started = not dist.is_initialized()
    init_distributed("cpu")
    yield
    if started:
        shutdown()


def lively_weights(shape, *, seed):
    """Weights at which every parameter matters: no norm is one, no bias zero, logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for parameter in parameters(shape):
        value = torch.randn(parameter.shape, generator=generator)
        if "norm" in parameter.name and parameter.name.endswith("weight"):
            value = 1 + 0.3 * value
        elif len(parameter.shape) == 1:
            value = 0.3 * value
        else:
            value = value * (0.5 if "embedding" in parameter.name else parameter.shape[1] ** -0.5)
        value[parameter.dims[0].real :] = 0
        weights[parameter.name] = value
    return weights


def filled_model(level, weights, *, model, dtype=torch.float32):
    """The level's module with ``weights``."""
    config = config_for(model, coarse={}).model
    module = build_model(level, config, mesh=mesh_for(1), seed=None).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    return module


def batch_for(shape, *, seed, samples=3):
    """A random batch; BERT's has padding and two token types."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *size):
        return torch.randint(high, size, generator=generator)

    s, v = shape.sequence_length, shape.vocab_size
    batch = {"tokens": draw(v, samples, s)}
    if shape.architecture == "gpt":
        return {**batch, "labels": draw(v, samples, s), "weights": torch.ones(samples, s)}
    mask = torch.arange(s)[None] < torch.tensor([s, s - 3, s - 1])[:samples, None]
    batch |= {"token_types": draw(2, samples, s), "padding_mask": mask, "masked_positions": draw(s - 3, samples, 2)}
    batch |= {"labels": draw(v, samples, 2), "weights": torch.ones(samples, 2)}
    return {**batch, "sentence_order": draw(2, samples)} if shape.sentence_order else batch


@torch.no_grad()
def logits_of(module, batch, shape):
    """All logits over the real vocabulary, and the sentence-order logits where there are any, as one vector."""
    if shape.architecture == "gpt":
        return module.logits(batch["tokens"])[..., : shape.vocab_size].flatten()
    hidden = module.encode(batch["tokens"], batch["token_types"], batch["padding_mask"])
    found = [module.logits(hidden)[..., : shape.vocab_size].flatten()]
    if shape.sentence_order:
        found.append(module.order_logits(hidden).flatten())
    return torch.cat(found)


def adam_moments(module, batches):
    """(exp_avg, exp_avg_sq) by parameter after Adam has seen ``batches`` at learning rate 0."""
    adam = torch.optim.AdamW(module.parameters(), lr=0.0)
    for batch in batches:
        adam.zero_grad()
        lm_sum, order_sum = module(**batch)
        (lm_sum + order_sum).backward()
        adam.step()
    named = dict(module.named_parameters())
    return tuple({n: adam.state[p][key] for n, p in named.items()} for key in ("exp_avg", "exp_avg_sq"))

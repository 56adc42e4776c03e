"""Free everything a DeepSpeed engine holds, one of ZeRO 3 that has stepped included."""

from __future__ import annotations

import gc

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def release(engine: DeepSpeedEngine) -> None:
    """Take the engine apart so that it, its model and its optimizer are freed once the caller drops its own references.

    ``engine.destroy()`` alone leaves a ZeRO 3 engine alive for ever: a list in DeepSpeed holds the model, whose hooks
    and parameters hold the optimizer. No collective; process groups stay. The engine and its model are unusable after.
    """
    model: nn.Module = engine.module
    parameter_offload.FWD_MODULE_STACK[:] = [m for m in parameter_offload.FWD_MODULE_STACK if m is not model]
    engine.destroy()
    for module in model.modules():
        for hooks in _HOOKS:
            getattr(module, hooks).clear()
        _forget(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None
                _forget(parameter)
    gc.collect()


def _forget(thing: object) -> None:
    """Drop the attributes DeepSpeed has hung on a module or parameter."""
    for key in [key for key in vars(thing) if key.startswith("ds_")]:
        delattr(thing, key)

"""Free everything a DeepSpeed engine holds, one of ZeRO 3 that has stepped included."""

from __future__ import annotations

import gc
from types import FunctionType

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE_ATTRIBUTES = {
    "pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "_original_parameters", "_external_params",
}  # fmt: skip


def release(engine: DeepSpeedEngine) -> None:
    """Take the engine apart: its optimizer is freed, and its model unless the caller holds it (it is unusable).

    ``engine.destroy()`` alone leaves a ZeRO 3 engine alive for ever: a list and a cache in DeepSpeed hold the model,
    whose hooks and parameters hold the optimizer. No
    collective; process groups stay; the engine is left an empty shell.
    """
    model: nn.Module = engine.module
    parameter_offload.FWD_MODULE_STACK[:] = [m for m in parameter_offload.FWD_MODULE_STACK if m is not model]
    engine.destroy()
    _forget_memoised_modules()
    for module in list(model.modules()):
        for hooks in _HOOKS:
            getattr(module, hooks).clear()
        _strip_module(module)
    vars(engine).update(optimizer=None, basic_optimizer=None, client_optimizer=None, module=None, param_names={})
    engine._modules.clear()
    del model, module
    gc.collect()


def _forget_memoised_modules() -> None:
    """Empty the caches that ZeRO 3's methods keep by (coordinator, module); they sit behind a wrapper's closure."""
    for method in vars(PartitionedParameterCoordinator).values():
        cells = method.__closure__ or () if isinstance(method, FunctionType) else ()
        for cell in cells:
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def _strip_module(module: nn.Module) -> None:
    """Drop what DeepSpeed has hung on a module and its parameters: hooks' closures, views, its parameter dictionary.

    A tensor that C++ still refers to is opaque to Python's garbage collector, so a cycle through a parameter's
    attributes (its partition, methods bound to it) is never found: cut it here.
    """
    held = dict(module._parameters)
    for key in _MODULE_ATTRIBUTES & vars(module).keys():
        delattr(module, key)
    for key in [key for key in vars(module) if key.startswith("ds_")]:
        delattr(module, key)
    module._parameters = held
    for parameter in held.values():
        if parameter is not None:
            parameter.grad = None
            vars(parameter).clear()

"""``ds-vcycle coalesce`` and ``ds-vcycle refine``: a change of level on finished checkpoints, without a model or a GPU.

The same bits as a live transition's, parameter by parameter and block by block, so that memory holds a few blocks
however large the model is. Each process takes a share of the parameters and writes one file of the new checkpoint, in
which parameters are whole: any layout reads it. Hugging Face directories are read in the same way, and written by one
process, which holds a whole parameter with its counterparts in the layers that share one of the coarse level.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ds_vcycle.checkpoint.offline.blockwise import (
    BUCKET_ELEMENTS,
    Blend,
    coarse_fragments,
    coarse_tensors,
    fine_fragments,
    fine_tensors,
)
from ds_vcycle.checkpoint.offline.inputs import (
    Form,
    Source,
    both_levels,
    of_maps,
    of_model,
    open_source,
    plan_between,
    two_levels,
)
from ds_vcycle.checkpoint.offline.output import Advance, Output, Task, Written, checked_form, origin_of, write
from ds_vcycle.checkpoint.offline.processes import ALONE, Processes, together
from ds_vcycle.checkpoint.recorded import recorded
from ds_vcycle.checkpoint.source import WeightSource
from ds_vcycle.config import MomentPolicy, RunConfig
from ds_vcycle.operators.apply import QUANTITIES, Quantity
from ds_vcycle.operators.plan import TransitionPlan


def coalesce_checkpoint(
    source: Path, to: Path | Output, *, config_file: Path | None = None, overrides: Sequence[str] = (),
    processes: Processes = ALONE, advance: Advance = lambda done, total: None, bucket: int = BUCKET_ELEMENTS,
) -> Written:  # fmt: skip
    """Coalesce a checkpoint's level n to level n + 1 and write it to ``to``. Called by every process.

    Args:
        source: a checkpoint, a run directory (its latest), or a Hugging Face directory.
        to: directory to write, with how if it is not the source's form in a place of its own.
        config_file: of the levels and policies of a Hugging Face model.
        overrides: of the recorded configuration (``operators.depth_residual=copy``, ``levels.1.hidden=256``).
        processes: this one alone, or those of a launch.
        advance: told of the elements done and to do in this process.
        bucket: fine elements of one parameter handled at once.

    Raises:
        UserError: on every process, with the same text; nothing is written.
    """
    output = to if isinstance(to, Output) else Output(to=to)
    with ExitStack() as stack:

        def prepare() -> tuple[Source, RunConfig, TransitionPlan, Form]:
            fine = open_source(source, config=config_file, overrides=of_model(overrides))
            stack.enter_context(fine)
            form = checked_form(output, [fine], processes)
            held = recorded(fine)
            config = two_levels(held.config, held.level.index, of_maps(overrides, fine))
            return fine, config, plan_between(config, held.level.index, fine=fine), form

        fine, config, plan, form = together(processes, prepare)
        keys, step = _quantities(fine, config.operators.moments, form)
        task = Task(
            maps=plan.maps,
            fragments=lambda item: coarse_fragments(item, keys, bucket),
            tensors=lambda item: coarse_tensors(fine, item, keys, bucket),
        )
        written = Written(
            directory=output.to,
            level=plan.coarse,
            groupings=plan.coarse.groupings,
            adam_step=step,
            config=config,
            form=form,
        )
        origin = {"verb": "coalesce", "fine": origin_of(fine)}
        write(output, written, task, origin=origin, source=fine, processes=processes, advance=advance)
        return written


def refine_checkpoints(
    fine_source: Path, coarse_source: Path, to: Path | Output, *, alpha: float | None = None,
    beta: float | None = None, config_file: Path | None = None, overrides: Sequence[str] = (),
    processes: Processes = ALONE, advance: Advance = lambda done, total: None, bucket: int = BUCKET_ELEMENTS,
) -> Written:  # fmt: skip
    """De-coalesce a coarse checkpoint, blend it with a fine one, and write the fine level to ``to``.

    The maps are those of the coarse checkpoint's configuration where that has both levels, else of the fine one's with
    the coarse model's sizes.

    Args:
        fine_source: the kept fine level: a checkpoint, a run directory (its latest), or a Hugging Face directory.
        coarse_source: the trained coarse level, of the same run or of a run of its own, likewise.
        to: as for :func:`coalesce_checkpoint`, and so all that follows.
        alpha: default ``operators.alpha``.
        beta: default ``operators.beta``.
        config_file: of the levels and policies of a fine Hugging Face model.
        overrides: of the configuration that has both levels.
        processes: this one alone, or those of a launch.
        advance: told of the elements done and to do in this process.
        bucket: fine elements of one parameter handled at once.

    Raises:
        UserError: on every process, with the same text; nothing is written.
    """
    given = {"alpha": alpha, "beta": beta}
    blended = [*overrides, *(f"operators.{key}={value}" for key, value in given.items() if value is not None)]
    output = to if isinstance(to, Output) else Output(to=to)
    with ExitStack() as stack:

        def prepare() -> tuple[Source, Source, RunConfig, TransitionPlan, Form]:
            fine = open_source(fine_source, config=config_file, overrides=of_model(overrides))
            stack.enter_context(fine)
            coarse = open_source(coarse_source, config=None, overrides=of_model(overrides))
            stack.enter_context(coarse)
            form = checked_form(output, [fine, coarse], processes)
            config, index = both_levels(fine, coarse, of_maps(blended, fine, coarse))
            return fine, coarse, config, plan_between(config, index, fine=fine, coarse=coarse), form

        fine, coarse, config, plan, form = together(processes, prepare)
        keys, step = _quantities(coarse, config.operators.moments, form)
        blend = Blend(fine=fine, coarse=coarse, alpha=config.operators.alpha, beta=config.operators.beta)
        task = Task(
            maps=plan.maps,
            fragments=lambda item: fine_fragments(item, keys, bucket),
            tensors=lambda item: fine_tensors(blend, item, keys, bucket),
        )
        written = Written(
            directory=output.to,
            level=plan.fine,
            groupings=plan.coarse.groupings,
            adam_step=step,
            config=config,
            form=form,
        )
        blending = {"alpha": blend.alpha, "beta": blend.beta}
        origin = {"verb": "refine", "fine": origin_of(fine), "coarse": origin_of(coarse), **blending}
        write(output, written, task, origin=origin, source=fine, processes=processes, advance=advance)
        return written


def _quantities(source: WeightSource, moments: MomentPolicy, form: Form) -> tuple[tuple[Quantity, ...], int]:
    """Which tensors are mapped, and Adam's step with them."""
    step = int(source.state.get("adam_step", 0)) if form == "store" else 0
    return (QUANTITIES, step) if moments == "map" and step else (("master",), 0)

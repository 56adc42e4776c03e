import copy
import json

import pytest

from ds_vcycle.baselines.inheritance import teachers_share
from ds_vcycle.config import ConfigError, RunConfig, parse_config
from ds_vcycle.cycle.overview import TransitionOverview, overview
from ds_vcycle.cycle.phases import (
    Coalesce,
    Phase,
    Refine,
    Train,
    first_difference,
    first_level,
    from_records,
    to_records,
)
from ds_vcycle.cycle.schedule import expand, warnings_for
from ds_vcycle.train.lr import LrSchedule, learning_rate

BASE = {
    "model": {"architecture": "gpt", "layers": 8, "hidden": 64, "heads": 8, "sequence_length": 16, "vocab_size": 100},
    "training": {"global_batch": 8, "micro_batch": 4},
    "data": {"path": "data/x"},
    "lr": {"peak": 1e-3, "minimum": 1e-5, "warmup_steps": 2, "schedule": "linear"},
}
V = {"kind": "V", "initial": {"steps": 10}, "coarse": {"steps": 50}, "final": {"steps": 30}}


def config(cycle: dict[str, object], **sections: object) -> RunConfig:
    return parse_config({**copy.deepcopy(BASE), "cycle": cycle, **sections})


def words(phases: tuple[Phase, ...]) -> list[str]:
    return [f"{phase} x {phase.steps}" if isinstance(phase, Train) else str(phase) for phase in phases]


def test_flat_is_one_phase_with_the_runs_learning_rate():
    lr = LrSchedule(peak=1e-3, minimum=1e-5, warmup_steps=2, kind="linear", steps=100)
    assert expand(config({"kind": "flat", "flat": {"steps": 100}})) == (Train(index=0, level=1, steps=100, lr=lr),)


def test_v_with_two_levels():
    assert words(expand(config(V))) == [
        "train level 1 x 10",
        "coalesce level 1 -> 2",
        "train level 2 x 50",
        "refine level 2 -> 1",
        "train level 1 x 30",
    ]


def test_v_with_three_levels_trains_the_middle_one_on_the_way_down_and_up():
    phases = expand(config({**V, "levels": 3}))
    assert words(phases) == [
        "train level 1 x 10",
        "coalesce level 1 -> 2",
        "train level 2 x 10",
        "coalesce level 2 -> 3",
        "train level 3 x 50",
        "refine level 3 -> 2",
        "train level 2 x 50",
        "refine level 2 -> 1",
        "train level 1 x 30",
    ]
    assert [phase.index for phase in phases] == list(range(9))


def test_w_visits_the_coarser_levels_gamma_times():
    w = config({**V, "kind": "W", "levels": 3})
    assert levels_visited(expand(w)) == [1, 2, 3, 2, 3, 2, 1]
    assert [phase.steps for phase in expand(w) if isinstance(phase, Train)] == [10, 10, 50, 50, 50, 50, 30]
    thrice = config({**V, "kind": "W", "gamma": 3, "levels": 3})
    assert levels_visited(expand(thrice)) == [1, 2, 3, 2, 3, 2, 3, 2, 1]
    deep = config({**V, "kind": "W", "levels": 4})
    assert levels_visited(expand(deep)) == [1, 2, 3, 4, 3, 4, 3, 2, 3, 4, 3, 4, 3, 2, 1]


def test_f_starts_at_the_coarsest_level_and_makes_a_v_of_each_that_it_reaches():
    phases = expand(config({**V, "kind": "F", "levels": 3}))
    assert words(phases) == [
        "train level 3 x 50",
        "refine level 3 -> 2, which is new",
        "train level 2 x 10",
        "coalesce level 2 -> 3",
        "train level 3 x 50",
        "refine level 3 -> 2",
        "train level 2 x 50",
        "refine level 2 -> 1, which is new",
        "train level 1 x 10",
        "coalesce level 1 -> 2",
        "train level 2 x 10",
        "coalesce level 2 -> 3",
        "train level 3 x 50",
        "refine level 3 -> 2",
        "train level 2 x 50",
        "refine level 2 -> 1",
        "train level 1 x 30",
    ]
    assert first_level(phases) == 3


def test_growth_goes_up_once():
    cycle = {"kind": "growth", "levels": 3, "coarse": {"steps": 50}, "final": {"steps": 30}}
    assert words(expand(config(cycle))) == [
        "train level 3 x 50",
        "refine level 3 -> 2, which is new",
        "train level 2 x 50",
        "refine level 2 -> 1, which is new",
        "train level 1 x 30",
    ]
    stacked = words(expand(config({**cycle, "levels": 2, "growth": {"method": "stackbert"}})))
    assert stacked == ["train level 2 x 50", "grow level 2 -> 1 (stackbert)", "train level 1 x 30"]


def test_knowledge_inheritance_trains_the_fine_level_with_the_coarser_one_as_its_teacher():
    growth = {"method": "knowledge_inheritance", "distill_steps": 12}
    cycle = {"kind": "growth", "levels": 3, "coarse": {"steps": 50}, "final": {"steps": 30}, "growth": growth}
    phases = expand(config(cycle))
    assert words(phases) == [
        "train level 3 x 50",
        "grow level 3 -> 2 (knowledge_inheritance)",
        "train level 2, taught by level 3 x 50",
        "grow level 2 -> 1 (knowledge_inheritance)",
        "train level 1, taught by level 2 x 30",
    ]
    assert from_records(json.loads(json.dumps(to_records(phases)))) == phases
    hotter = expand(config({**cycle, "growth": {**growth, "temperature": 3.0}}))
    assert first_difference(phases, hotter) == (
        "phase 2 (train level 2, taught by level 3): temperature is 2.0 in the run and 3.0 in the configuration"
    )
    plan = overview(config(cycle))
    steps = {level.index: level.step_flops for level in plan.levels}
    assert [phase.flops for phase in plan.phases] == [
        50 * steps[3], 0, 50 * steps[2] + 12 * steps[3] // 3, 0, 30 * steps[1] + 12 * steps[2] // 3
    ]  # fmt: skip
    assert plan.flops == sum(phase.flops for phase in plan.phases) and plan.transitions == ()
    assert [teachers_share(step, 4) for step in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]


def test_ligo_learns_its_maps_through_the_fine_level_which_has_to_be_small():
    growth = {"method": "ligo", "ligo_steps": 7, "ligo_lr": 1e-3}
    cycle = {"kind": "growth", "coarse": {"steps": 50}, "final": {"steps": 30}, "growth": growth}
    phases = expand(config(cycle))
    assert words(phases) == ["train level 2 x 50", "grow level 2 -> 1 (ligo)", "train level 1 x 30"]
    assert from_records(json.loads(json.dumps(to_records(phases)))) == phases
    faster = expand(config({**cycle, "growth": {**growth, "ligo_lr": 2e-3}}))
    assert first_difference(phases, faster) == (
        "phase 1 (grow level 2 -> 1 (ligo)): map_lr is 0.001 in the run and 0.002 in the configuration"
    )
    plan = overview(config(cycle))
    fine, coarse = (level.step_flops for level in plan.levels)
    assert [(phase.steps, phase.flops) for phase in plan.phases] == [(50, 50 * coarse), (7, 7 * fine), (30, 30 * fine)]
    assert plan.samples == 8 * 87 and plan.flops == 50 * coarse + 37 * fine
    large = {**BASE["model"], "hidden": 2048, "layers": 8, "vocab_size": 50304}
    with pytest.raises(ConfigError, match=r"method=ligo: level 1 has 505,\d\d\d,\d\d\d parameters, .* at most 400,000"):
        expand(config(cycle, model=large))
    for key in ("ligo_steps", "ligo_lr"):
        with pytest.raises(ConfigError, match=rf"{key}=.* is set, but method=stackbert does not read it"):
            config({**cycle, "growth": {"method": "stackbert", key: growth[key]}})


def test_a_teacher_must_divide_over_its_students_ranks():
    growth = {"method": "knowledge_inheritance", "distill_steps": 12}
    cycle = {"kind": "growth", "coarse": {"steps": 50}, "final": {"steps": 30}, "growth": growth}
    levels = [{}, {"heads": 1, "tensor_parallel": 1}]
    with pytest.raises(ConfigError, match=r"tensor_parallel=2, which does not divide heads=1 of level 2"):
        expand(config(cycle, levels=levels, model={**BASE["model"], "tensor_parallel": 2}))


def test_a_growth_method_has_groupings_and_policies_of_its_own():
    """Whatever the configuration's operators say: the plan shows what will be done, its traffic included."""
    cycle = {"kind": "growth", "coarse": {"steps": 50}, "final": {"steps": 30}, "growth": {"method": "stackbert"}}
    wide = {"hidden": 64, "heads": 8, "ffn": 256}

    def change(cycle: dict[str, object], layer: str) -> TransitionOverview:
        groupings = {"groupings": {"layer": layer}}
        (found,) = overview(config(cycle, levels=[{}, wide], operators=groupings), ranks=2).transitions
        return found

    found = change(cycle, "adjacent")
    assert {grouping.axis: grouping.grouping for grouping in found.groupings}["layer"] == "stack"
    assert (found.moments, found.lossless) == ("reset", False)
    own = {**cycle, "growth": {}}
    assert found.traffic == change(own, "stack").traffic != change(own, "adjacent").traffic


def test_coarse_levels_may_start_from_the_seed():
    phases = expand(config({**V, "coarse_from": "seed"}))
    assert phases[1] == Coalesce(index=1, fine=1, coarse=2, coarse_from="seed")


def levels_visited(phases: tuple[Phase, ...]) -> list[int]:
    return [phase.level for phase in phases if isinstance(phase, Train)]


@pytest.mark.parametrize(
    ("cycle", "message"),
    [
        ({**V, "kind": "W"}, "cycle: kind=W needs levels >= 3, not 2; raise it or set kind=V, which is the same"),
        ({**V, "kind": "F", "levels": 1}, "kind=F needs levels >= 2, not 1; raise it or set kind=flat"),
        ({**V, "gamma": 3}, "gamma=3 is set, but kind=V does not read it; remove cycle.gamma"),
        ({**V, "growth": {"method": "stackbert"}}, "growth is set, but kind=V does not read it"),
        ({**V, "kind": "growth"}, "initial is set, but kind=growth does not read it"),
        ({**V, "kind": "growth", "initial": {}, "coarse_from": "seed"}, "coarse_from=seed is set, but kind=growth"),
    ],
)
def test_settings_that_a_kind_does_not_read_are_refused(cycle, message):
    with pytest.raises(ConfigError, match=message):
        config(cycle)
    config({**cycle, "kind": "flat", "flat": {"steps": 5}})  # one word makes a baseline of any run


def test_phases_without_steps_are_left_out_and_the_rest_is_counted_on():
    phases = expand(config({**V, "initial": {"steps": 0}, "final": {"steps": 0}}))
    assert words(phases) == ["coalesce level 1 -> 2", "train level 2 x 50", "refine level 2 -> 1"]
    assert [phase.index for phase in phases] == [0, 1, 2]


def test_steps_of_a_level_override_its_coarse_and_final_phases_only():
    phases = expand(config({**V, "levels": 3}, levels=[{"steps": 31}, {"steps": 52}, {"steps": 53}]))
    trained = [(phase.level, phase.steps) for phase in phases if isinstance(phase, Train)]
    assert trained == [(1, 10), (2, 10), (3, 53), (2, 52), (1, 31)]


def test_learning_rate_comes_from_the_phase_then_the_level_then_the_run():
    cycle = {**V, "final": {"steps": 30, "lr": 7e-4, "warmup_steps": 5, "schedule": "cosine", "minimum_lr": 0.0}}
    phases = expand(config(cycle, levels=[{"lr": 9e-4}, {"lr": 4e-3}]))
    initial, coarse, final = (phase.lr for phase in phases if isinstance(phase, Train))
    assert initial == LrSchedule(peak=9e-4, minimum=1e-5, warmup_steps=2, kind="linear", steps=10)
    assert coarse == LrSchedule(peak=4e-3, minimum=1e-5, warmup_steps=2, kind="linear", steps=50)
    assert final == LrSchedule(peak=7e-4, minimum=0.0, warmup_steps=5, kind="cosine", steps=30)
    assert learning_rate(final, 4) == 7e-4


def test_a_phase_after_a_change_of_level_warms_up_anew_as_asked():
    tree = {**V, "coarse": {"steps": 50, "warmup_steps": 1}}
    phases = expand(config(tree, lr={"peak": 1e-3, "warmup_steps": 2, "rewarmup_steps": 7}))
    assert [phase.lr.warmup_steps for phase in phases if isinstance(phase, Train)] == [2, 1, 7]
    explicit = [{"train": 1, "steps": 9}, {"train": 1, "steps": 9}, {"coalesce": 1}, {"train": 2, "steps": 9}]
    phases = expand(config({"kind": "phases", "phases": explicit}, lr={"warmup_steps": 2, "rewarmup_steps": 0}))
    assert [phase.lr.warmup_steps for phase in phases if isinstance(phase, Train)] == [2, 2, 0]


def test_blend_comes_from_the_operators():
    refine = expand(config(V, operators={"alpha": 0.5, "beta": 0.75}))[3]
    assert refine == Refine(index=3, fine=1, coarse=2, alpha=0.5, beta=0.75)


def test_until_loss_is_handed_on():
    phases = expand(config({**V, "final": {"steps": 30, "until_loss": 4.2}}))
    assert [phase.until_loss for phase in phases if isinstance(phase, Train)] == [None, None, 4.2]


W = [
    {"train": 1, "steps": 5},
    {"coalesce": 1},
    {"coalesce": 2},
    {"train": 3, "steps": 9, "lr": 2e-3},
    {"refine": 2, "beta": 1.0},
    {"coalesce": 2},
    {"train": 3, "steps": 8},
    {"refine": 2},
    {"refine": 1, "alpha": 0.25},
    {"train": 1, "steps": 7, "until_loss": 3.0},
]


def test_an_explicit_list_may_visit_a_level_again():
    phases = expand(config({"kind": "phases", "phases": W}))
    assert words(phases) == [
        "train level 1 x 5",
        "coalesce level 1 -> 2",
        "coalesce level 2 -> 3",
        "train level 3 x 9",
        "refine level 3 -> 2",
        "coalesce level 2 -> 3",
        "train level 3 x 8",
        "refine level 3 -> 2",
        "refine level 2 -> 1",
        "train level 1 x 7",
    ]
    assert phases[4] == Refine(index=4, fine=2, coarse=3, alpha=1.0, beta=1.0)
    assert phases[8] == Refine(index=8, fine=1, coarse=2, alpha=0.25, beta=0.25)
    assert phases[1] == Coalesce(index=1, fine=1, coarse=2)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{"train": 2, "steps": 5}, {"coalesce": 1}], r"cycle.phases.1.coalesce=1: .* level 2 there; set coalesce: 2"),
        ([{"train": 1, "steps": 5}, {"coalesce": 1}, {"train": 1, "steps": 5}], r"phases.2.train=1: .* at level 2"),
        ([{"coalesce": 1}, {"coalesce": 1}], r"phases.1.coalesce=1: the cycle is at level 2 there; set coalesce: 2"),
        ([{"train": 1, "steps": 5}, {"refine": 1}], r"phases.1.refine=1: .* none: nothing is above level 1"),
        ([{"coalesce": 1}, {"coalesce": 2}, {"refine": 1}], r"phases.2.refine=1: .*can refine only level 2"),
        ([{"coalesce": 1}, {"refine": 1}], r"trains no step at all"),
    ],
)
def test_an_explicit_list_cannot_jump(phases, message):
    with pytest.raises(ConfigError, match=message):
        expand(config({"kind": "phases", "phases": phases}))


@pytest.mark.parametrize(
    ("cycle", "key"),
    [
        ({"kind": "flat"}, "cycle.flat.steps is missing"),
        ({"kind": "V", "coarse": {"steps": 5}, "final": {"steps": 5}}, "cycle.initial.steps is missing"),
        ({"kind": "V", "initial": {"steps": 5}, "final": {"steps": 5}}, "set cycle.coarse.steps or levels.1.steps"),
        ({"kind": "V", "initial": {"steps": 5}, "coarse": {"steps": 5}}, "set cycle.final.steps or levels.0.steps"),
    ],
)
def test_missing_steps_are_named(cycle, key):
    with pytest.raises(ConfigError, match=key):
        expand(config(cycle))


def test_settings_that_an_explicit_list_would_ignore_are_refused():
    phases = [{"train": 1, "steps": 5}]
    with pytest.raises(ConfigError, match=r"remove cycle\.coarse"):
        expand(config({"kind": "phases", "phases": phases, "coarse": {"steps": 5}}))
    with pytest.raises(ConfigError, match=r"levels\.0\.steps=3"):
        expand(config({"kind": "phases", "phases": phases}, levels=[{"steps": 3}]))


def test_a_learning_rate_that_contradicts_itself_is_refused():
    with pytest.raises(ConfigError, match=r"cycle.initial \(level 1\): warmup_steps=11 exceeds its 10 steps"):
        expand(config({**V, "initial": {"steps": 10, "warmup_steps": 11}}))
    with pytest.raises(ConfigError, match=r"cycle.final \(level 1\): the minimum learning rate 1e-05 exceeds the peak"):
        expand(config({**V, "final": {"steps": 10, "lr": 1e-6}}))


def test_the_list_survives_json():
    phases = expand(config({"kind": "phases", "phases": W}))
    assert from_records(json.loads(json.dumps(to_records(phases)))) == phases


def test_what_an_older_list_does_not_say_has_its_default():
    phases = expand(config(V))
    records = to_records(phases)
    del records[1]["coarse_from"], records[3]["kept"]
    assert from_records(records) == phases


def test_a_record_that_is_no_phase_is_refused():
    records = to_records(expand(config(V)))
    records[1]["kind"] = "shrink"
    with pytest.raises(ConfigError, match="phase 1 of the recorded list is not a phase"):
        from_records(records)
    del records[1]
    del records[2]["beta"]
    with pytest.raises(ConfigError, match="phase 2 of the recorded list"):
        from_records(records)


@pytest.mark.parametrize(
    ("cycle", "operators", "difference"),
    [
        (V, {}, None),
        ({**V, "coarse": {"steps": 60}}, {}, "phase 2 (train level 2): steps is 50 in the run and 60 in the config"),
        (
            {**V, "coarse": {"steps": 50, "lr": 2e-3}},
            {},
            "phase 2 (train level 2): lr.peak is 0.001 in the run and 0.0",
        ),
        (V, {"beta": 1.0}, "phase 3 (refine level 2 -> 1): beta is 0.25 in the run and 1.0 in the configuration"),
        (
            {**V, "initial": {"steps": 0}},
            {},
            "phase 0 is 'train level 1' in the run and 'coalesce level 1 -> 2' in the",
        ),
        ({**V, "final": {"steps": 0}}, {}, "phase 4 ('train level 1') is only in the run"),
    ],
)
def test_first_difference_in_words(cycle, operators, difference):
    found = first_difference(expand(config(V)), expand(config(cycle, operators=operators)))
    assert (found is None) == (difference is None)
    assert (found or "").startswith(difference or "")


def test_warnings():
    assert warnings_for(config(V)) == ()
    assert "nothing breaks the symmetry of the copies" in warnings_for(config(V, operators={"beta": 0.0}))[0]
    assert "nothing that level 2 learned reaches level 1" in warnings_for(config(V, operators={"alpha": 0.0}))[0]
    post = {**BASE["model"], "architecture": "bert", "norm_placement": "post"}
    reference = {"embedding": "reference"}
    assert "norm_eps=1e-05" in warnings_for(config(V, model=post, operators=reference))[0]
    assert warnings_for(config(V, model={**post, "norm_eps": 1e-12}, operators=reference)) == ()
    assert warnings_for(config(V, model=post)) == ()
    down = [{"coalesce": 1}, {"train": 2, "steps": 5}]
    assert "ends at level 2" in warnings_for(config({"kind": "phases", "phases": down}))[0]

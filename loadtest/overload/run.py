"""Run the variants of a study: in virtual time, or on fresh processes one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.http import HttpFailure
from loadtest.overload.machine import Watch
from loadtest.overload.stage import Stage, stage
from loadtest.overload.study import Results, Run, Study
from loadtest.overload.user_calls import counted
from loadtest.overload.users import Experiment
from loadtest.overload.variant import Variant
from loadtest.overload.virtual_time import VirtualTime

SEED = 1


def run(study: Study, say: Callable[[str], None], *, seed: int = SEED) -> Results:
    """Every variant."""
    results = {}
    for variant in study.variants:
        crowds = variant.crowds or study.crowds
        say(f"{study.name}: {variant.label}, {max(crowd.seconds for crowd in crowds):.0f} s")
        results[variant.label] = _virtual(study, variant, seed) if study.is_virtual else _real(study, variant, seed)
    return results


def _virtual(study: Study, variant: Variant, seed: int) -> Run:
    world = VirtualTime(variant, variant.backend or study.backend, variant.crowds or study.crowds, seed)
    calls = world.run()
    return Run(calls, world.points)


def _real(study: Study, variant: Variant, seed: int) -> Run:
    terms = variant.backend or study.backend
    with stage([variant.policy], terms) as processes:
        return asyncio.run(_measured(study, variant, processes, terms, seed))


async def _measured(study: Study, variant: Variant, processes: Stage, terms: BackendTerms, seed: int) -> Run:
    crowds = variant.crowds or study.crowds
    watch, experiment = Watch(), Experiment(processes.backend, processes.headgate, seed)
    try:
        calls = await experiment.run(crowds, beside=_hang(processes, terms) if terms.hangs else None)
    finally:
        processes.backend.close()
        processes.headgate.close()
    # Between the end and its noticing there is time to refuse somebody, which is no second of its own.
    seconds = max(crowd.seconds for crowd in crowds)
    return Run(counted(one for one in calls if one.second < seconds), (), watch.seen(experiment.lags_s))


async def _hang(processes: Stage, terms: BackendTerms) -> None:
    assert terms.hangs is not None
    from_s, to_s = terms.hangs
    await asyncio.sleep(from_s)
    status, _ = await processes.backend.post(f"/hang?seconds={to_s - from_s:g}")
    if status != 200:
        raise HttpFailure(f"hang was answered with {status}")

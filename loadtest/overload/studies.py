"""All experiments, in the order of the published figures."""

from __future__ import annotations

from loadtest.overload.figures.cheaper_work import DEGRADE, DEGRADE_ALONE, DEGRADE_VIRTUAL
from loadtest.overload.figures.class_shares import CLASSES, CLASSES_ARRIVE
from loadtest.overload.figures.control_over_time import OVER_TIME
from loadtest.overload.figures.missed_expectations import EXPECTATIONS, EXPECTATIONS_REAL
from loadtest.overload.figures.numbers_of_users import NUMBERS_OF_USERS
from loadtest.overload.figures.request_types import REQUEST_TYPES
from loadtest.overload.figures.spikes import SPIKE

STUDIES = {
    study.name: study
    for study in (
        OVER_TIME,
        NUMBERS_OF_USERS,
        REQUEST_TYPES,
        SPIKE,
        DEGRADE_ALONE,
        DEGRADE,
        DEGRADE_VIRTUAL,
        CLASSES_ARRIVE,
        CLASSES,
        EXPECTATIONS,
        EXPECTATIONS_REAL,
    )
}

"""A scrape, read by prometheus-client's own parser."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

POLICIES = """
policies:
  - {name: learning, match: {service: learning}, rate: 100000, charge: learned}
  - {name: capped, match: {service: capped}, rate: 100000, mechanism: requests}
  - {name: month, match: {service: month}, quota: {work: 1000, period: month}}
  - name: guarded
    match: {service: guarded}
    rate: 1000
    overload: {expectations: {}, response_time: {rules: published}}
  - {name: timed, match: {service: timed}, rate: 1000, overload: {response_time: {percentiles: true}}}
  - {name: each, match: {service: each}, per: [customer], rate: 1/d, capacity: 10, max_debt: 100}
  - {name: lent, match: {service: lent}, rate: 100, local: {allowed: true}}
"""


@dataclass
class Scrape:
    """The answer to one scrape."""

    families: list[Metric] = field(default_factory=list)

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample that has these labels."""
        (found,) = self.values(name, **labels).values()
        return found

    def values(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        return {
            tuple(sorted(sample_labels.items())): value
            for sample, sample_labels, value in self.samples()
            if sample == name and labels.items() <= sample_labels.items()
        }

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        for family in self.families:
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def label_names(self) -> dict[str, set[str]]:
        """The labels of each sample's name."""
        found: dict[str, set[str]] = {}
        for name, labels, _ in self.samples():
            found.setdefault(name, set()).update(labels)
        return found

    def label_values(self) -> dict[tuple[str, str], set[str]]:
        """The values of each label, by the sample's name."""
        found: dict[tuple[str, str], set[str]] = {}
        for name, labels, _ in self.samples():
            for label, value in labels.items():
                found.setdefault((name, label), set()).add(value)
        return found


def scrape(client: httpx.Client, path: str = "/metrics") -> Scrape:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return Scrape(list(text_string_to_metric_families(answer.text)))

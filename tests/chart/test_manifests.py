"""Manifests of the chart, under each of its values files: valid for Kubernetes, restricted, and consistent."""

import functools
import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import pytest
import yaml

from api.server import GRACE_S
from limiter.store.link.urls import parse
from tests.support.rendering import (
    CHART,
    GOOD,
    NAMESPACE,
    ROOT,
    Manifest,
    containers,
    environment_of,
    find,
    find_all,
    needs_helm,
    pods,
    render,
    run_helm,
    stem,
    values_of,
)

pytestmark = needs_helm

KUBERNETES = ["1.30", "1.32", "1.34", "1.37"]
OF_THE_OPERATOR = {
    kind: json.loads((Path(__file__).parent / f"{kind.lower()}.schema.json").read_text())
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
}

every_values_file = pytest.mark.parametrize("values", GOOD, ids=stem)


@pytest.fixture(autouse=True, scope="module")
def schemas_are_read_once() -> Iterator[None]:
    """The schemas are megabytes of JSON, and the package reads them again for every manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(_schema_contents))
        yield


_schema_contents = kubernetes_validate.utils.schema_contents


def test_the_chart_passes_the_linter_with_its_defaults() -> None:
    done = run_helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout


@every_values_file
def test_the_chart_passes_the_linter(values: Path) -> None:
    done = run_helm("lint", "--strict", "--values", values, CHART)
    assert done.returncode == 0, done.stdout


def test_the_package_holds_what_is_needed_and_nothing_else(tmp_path: Path) -> None:
    done = run_helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("headgate-*.tgz")
    with tarfile.open(archive) as packed:
        names = {Path(name).relative_to("headgate") for name in packed.getnames()}
    there = {path.relative_to(CHART) for path in CHART.rglob("*") if path.is_file()}
    aside = ("ci", ".helmignore", "__pycache__")
    assert names == {path for path in there if not set(aside) & set(path.parts)}


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_fits_its_schema(version: str) -> None:
    """Strictly: no field that Kubernetes does not know."""
    seen: set[str] = set()
    for manifest in (it for values in GOOD for it in render(values)):
        text = json.dumps(manifest, sort_keys=True)
        if text in seen:
            continue
        seen.add(text)
        if manifest["kind"] in OF_THE_OPERATOR:
            jsonschema.validate(manifest, OF_THE_OPERATOR[manifest["kind"]])
        else:
            kubernetes_validate.utils.validate(manifest, version, strict=True)
    assert len(seen) > 40


def test_the_schemas_do_refuse() -> None:
    deployment = json.loads(json.dumps(find(render("minimal"), "Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.utils.ValidationError):
        kubernetes_validate.utils.validate(deployment, KUBERNETES[0], strict=True)


ALLOWED_VOLUMES = {"configMap", "emptyDir", "secret", "persistentVolumeClaim", "projected", "downwardAPI"}


@every_values_file
def test_every_pod_is_restricted(values: Path) -> None:
    """Pod security "restricted", word by word."""
    for name, pod in pods(render(values)):
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for volume in spec.get("volumes", []):
            assert volume.keys() - {"name"} <= ALLOWED_VOLUMES, name
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert context.get("runAsUser", 1) > 0, name
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert context["runAsNonRoot"] is True, name
            assert context.keys() <= {
                "allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem", "runAsNonRoot"
            }, name  # fmt: skip
            assert not [port for port in container.get("ports", []) if "hostPort" in port], name


@every_values_file
def test_no_pod_writes_on_its_image_or_asks_kubernetes_anything(values: Path) -> None:
    for name, pod in pods(render(values)):
        assert pod["spec"]["automountServiceAccountToken"] is False, name
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            mounts = {it["name"]: it for it in container.get("volumeMounts", [])}
            volumes = {it["name"]: it for it in pod["spec"].get("volumes", [])}
            claims = {"data"} if "valkey" in name else set()
            assert mounts.keys() <= volumes.keys() | claims, name
            for mount in mounts.values():
                writable = "emptyDir" in volumes.get(mount["name"], {"emptyDir": {}})
                assert mount.get("readOnly", False) is not writable, name
            if container["name"] != "test":
                assert mounts["tmp"]["mountPath"] == "/tmp", name
    accounts = find_all(render(values), "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)


@every_values_file
def test_services_set_no_variables(values: Path) -> None:
    """A Service called headgate would set HEADGATE_PORT=tcp://…, which is a setting and would be refused."""
    assert all(pod["spec"]["enableServiceLinks"] is False for _, pod in pods(render(values)))


@every_values_file
def test_every_container_requests_resources_and_is_never_throttled(values: Path) -> None:
    for name, pod in pods(render(values)):
        for container in containers(pod):
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), name
            assert resources["limits"].keys() == {"memory"}, name


@every_values_file
def test_everything_has_a_name_of_its_own_a_namespace_and_labels(values: Path) -> None:
    manifests = render(values)
    names = [(it["kind"], it["metadata"]["name"]) for it in manifests]
    assert len(names) == len(set(names))
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == NAMESPACE
        assert len(manifest["metadata"]["name"]) <= 63
        assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "headgate"


def test_long_names_are_cut_to_the_length_that_kubernetes_allows() -> None:
    manifests = render("trial", sets=("fullnameOverride=" + "a" * 50,))
    assert max(len(it["metadata"]["name"]) for it in manifests) <= 63
    assert all(len(label) <= 63 for it in manifests for label in it["metadata"]["labels"].values())


@every_values_file
def test_every_selector_finds_its_targets(values: Path) -> None:
    manifests = render(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests)}

    def selected(wanted: dict[str, str]) -> list[str]:
        return [name for name, has in labels.items() if wanted.items() <= has.items()]

    for manifest in manifests:
        spec, own = manifest.get("spec", {}), manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        match manifest["kind"]:
            case "Service":
                found = selected(spec["selector"])
            case "NetworkPolicy":
                found = selected(spec["podSelector"]["matchLabels"])
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                found = selected(spec["selector"]["matchLabels"])
            case "ServiceMonitor":
                service = find(manifests, "Service")
                assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
                assert spec["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
                continue
            case "PodMonitor":
                found = selected(spec["selector"]["matchLabels"])
                (container,) = find(manifests, "Deployment", own)["spec"]["template"]["spec"]["containers"]
                assert spec["podMetricsEndpoints"][0]["port"] in [port["name"] for port in container["ports"]]
            case "HorizontalPodAutoscaler":
                assert spec["scaleTargetRef"]["name"] == find(manifests, "Deployment")["metadata"]["name"]
                continue
            case _:
                continue
        assert len(found) == 1, manifest["metadata"]["name"]
        assert labels[found[0]]["app.kubernetes.io/component"] == own


def references(spec: Manifest) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name and key of every object that a pod refers to."""
    for volume in spec.get("volumes", []):
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"], None
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], volume["configMap"]["items"][0]["key"]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                yield "Secret", reference["name"], reference["key"]


@every_values_file
def test_everything_that_a_pod_refers_to_is_made_here_or_named_in_the_values(values: Path) -> None:
    manifests = render(values)
    made: dict[tuple[str, str], Any] = {
        (it["kind"], it["metadata"]["name"]): it.get("stringData", it.get("data", {})) for it in manifests
    }
    given = yaml.safe_load(values.read_text())
    theirs = {given.get(at, {}).get(name) for at in ("redis", "apiKeys", "secret", "tls", "policies", "proxy")
              for name in ("existingSecret", "tlsSecret", "existingConfigMap")}  # fmt: skip
    for name, pod in pods(manifests):
        for kind, referred, key in references(pod["spec"]):
            if (kind, referred) in made:
                assert key is None or key in made[kind, referred], name
            else:
                assert referred in theirs, name


def test_secrets_of_the_user_s_own_leave_none_to_the_chart() -> None:
    manifests = render("secrets")
    assert not [it for it in manifests if it["kind"] in ("Secret", "ConfigMap")]
    found = {reference for _, pod in pods(manifests) for reference in references(pod["spec"])}
    assert found == {
        ("Secret", "store", "url"),
        ("Secret", "callers", "entries"),
        ("Secret", "signing", "text"),
        ("ConfigMap", "limits", "limits.yaml"),
    }


@every_values_file
def test_secrets_are_in_secrets_and_nowhere_else(values: Path) -> None:
    """Neither in a variable's plain value, nor in an argument, annotation or ConfigMap."""
    given = yaml.safe_load(values.read_text())
    valkey = given.get("valkey", {})
    secrets = [given.get("redis", {}).get("url"), given.get("secret", {}).get("value")]
    secrets += [*given["apiKeys"].get("entries", []), valkey.get("enabled") and valkey["password"]]
    others = json.dumps([it for it in render(values) if it["kind"] != "Secret"])
    assert not [secret for secret in secrets if secret and secret in others]


@every_values_file
def test_the_controller_knows_no_key_and_no_secret_but_the_store_s(values: Path) -> None:
    (container,) = find(render(values), "Deployment", "controller")["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["controller"]
    names = {it["name"] for it in container["env"] if it["name"].startswith("HEADGATE_")}
    told = {"HEADGATE_LOG_FORMAT", "HEADGATE_LOG_LEVEL", "HEADGATE_CYCLE_MS", "HEADGATE_HOST", "HEADGATE_METRICS_PORT"}
    assert names == {"HEADGATE_REDIS_URL", *told}


@pytest.mark.parametrize(
    ("values", "kind", "tls"),
    [
        ("minimal", "server", False),
        ("tls", "server", True),
        ("sentinel", "sentinel", False),
        ("cluster", "cluster", True),
        ("trial", "server", False),
    ],
)
def test_the_store_is_the_one_that_was_named(values: str, kind: str, tls: bool) -> None:
    manifests = render(values)
    for component in ("api", "controller"):
        (container,) = find(manifests, "Deployment", component)["spec"]["template"]["spec"]["containers"]
        target = parse(environment_of(container, manifests)["HEADGATE_REDIS_URL"])
        assert (target.kind, target.tls) == (kind, tls)


def test_certificates_are_where_the_url_says() -> None:
    manifests = render("tls")
    for component in ("api", "controller"):
        (container,) = find(manifests, "Deployment", component)["spec"]["template"]["spec"]["containers"]
        options = parse(environment_of(container, manifests)["HEADGATE_REDIS_URL"]).options
        files = [Path(options[name]).parent for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")]
        assert {str(path) for path in files} == {"/etc/headgate/redis-tls"}
        assert "/etc/headgate/redis-tls" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_bundled_valkey_is_reached_by_its_service_with_its_password() -> None:
    manifests = render("trial")
    (container,) = find(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    target = parse(environment_of(container, manifests)["HEADGATE_REDIS_URL"])
    service = find(manifests, "Service", "valkey")
    assert target.addresses == ((service["metadata"]["name"], service["spec"]["ports"][0]["port"]),)
    assert target.options["password"] == values_of("trial")["valkey"]["password"]


def api_container(*values: str, sets: tuple[str, ...] = ()) -> Manifest:
    (found,) = find(render(*values, sets=sets), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@every_values_file
def test_an_outage_of_the_store_restarts_nothing(values: Path) -> None:
    (container,) = find(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"
        assert container[probe]["httpGet"]["port"] in [port["name"] for port in container["ports"]]


def test_readiness_asks_readyz_by_default() -> None:
    assert api_container("minimal")["readinessProbe"]["httpGet"] == {
        "path": "/readyz", "port": "http", "scheme": "HTTP"
    }  # fmt: skip
    assert api_container("everything")["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert api_container("tls")["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


@every_values_file
def test_a_stopping_pod_has_the_time_it_needs(values: Path) -> None:
    spec = find(render(values), "Deployment")["spec"]["template"]["spec"]
    sleep_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep_s >= 5
    assert spec["terminationGracePeriodSeconds"] >= sleep_s + GRACE_S + 5


def test_policies_are_checked_before_they_are_used() -> None:
    spec = find(render("trial"), "Deployment")["spec"]["template"]["spec"]
    (check,) = spec["initContainers"]
    (container,) = spec["containers"]
    file = next(it["value"] for it in container["env"] if it["name"] == "HEADGATE_POLICIES")
    assert check["args"] == ["policies", "check", file]
    assert check["image"] == container["image"]
    assert "env" not in check, "it needs no secret"
    assert [it for it in container["volumeMounts"] if it in check["volumeMounts"]]


def test_without_policies_nothing_is_checked() -> None:
    spec = find(render("minimal"), "Deployment")["spec"]["template"]["spec"]
    assert "initContainers" not in spec
    assert "HEADGATE_POLICIES" not in [it["name"] for it in spec["containers"][0]["env"]]


@pytest.mark.parametrize("values", ["trial", "everything"])
def test_a_policy_file_arrives_as_it_was_written(values: str) -> None:
    content = values_of(values)["policies"]["content"]
    assert find(render(values), "ConfigMap")["data"] == {"policies.yaml": content}
    annotations = find(render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["checksum/policies"] == hashlib.sha256(content.encode()).hexdigest()


def annotations_of(*sets: str, component: str = "api") -> dict[str, str]:
    deployment = find(render("minimal", sets=sets), "Deployment", component)
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["annotations"]
    return found


def test_changed_policies_roll_the_api_and_leave_the_controller_alone() -> None:
    one, other = "policies.content=policies: []", "policies.content=policies: [ ]"
    assert annotations_of(one) != annotations_of(other)
    assert annotations_of(one, component="controller") == annotations_of(other, component="controller")


@pytest.mark.parametrize("component", ["api", "controller"])
def test_a_changed_store_rolls_both(component: str) -> None:
    assert annotations_of(component=component) != annotations_of("redis.url=redis://other", component=component)


def test_replicas_are_left_to_the_autoscaler_where_there_is_one() -> None:
    assert find(render("minimal"), "Deployment")["spec"]["replicas"] == 3
    assert not find_all(render("minimal"), "HorizontalPodAutoscaler")
    assert "replicas" not in find(render("everything"), "Deployment")["spec"]
    assert find(render("everything"), "HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 40


@every_values_file
def test_nodes_can_be_drained_even_while_the_store_is_away(values: Path) -> None:
    manifests = render(values)
    for component in ("api", "controller"):
        budget = find(manifests, "PodDisruptionBudget", component)["spec"]
        assert len(budget.keys() & {"maxUnavailable", "minAvailable"}) == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize("nothing", ["", "null"])
def test_a_budget_may_set_the_pods_that_stay_instead_of_those_that_go(nothing: str) -> None:
    sets = (f"podDisruptionBudget.maxUnavailable={nothing}", "podDisruptionBudget.minAvailable=2")
    budget = find(render("minimal", sets=sets), "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 2
    assert "maxUnavailable" not in budget


@every_values_file
def test_pods_of_a_component_keep_apart_from_each_other(values: Path) -> None:
    for component in ("api", "controller"):
        template = find(render(values), "Deployment", component)["spec"]["template"]
        constraints = template["spec"]["topologySpreadConstraints"]
        assert "kubernetes.io/hostname" in [it["topologyKey"] for it in constraints]
        for constraint in constraints:
            assert constraint["matchLabelKeys"] == ["pod-template-hash"]
            assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == component


def test_a_constraint_s_own_selector_is_kept() -> None:
    sets = ("topologySpreadConstraints[0].labelSelector.matchLabels.mine=yes",
            "topologySpreadConstraints[0].topologyKey=rack", "topologySpreadConstraints[0].maxSkew=1",
            "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule")  # fmt: skip
    (constraint,) = find(render("minimal", sets=sets), "Deployment")["spec"]["template"]["spec"][
        "topologySpreadConstraints"
    ]
    assert constraint["labelSelector"]["matchLabels"]["mine"] == "yes"


def ports(rules: list[Manifest]) -> set[int]:
    return {port["port"] for rule in rules for port in rule.get("ports", [])}


@pytest.mark.parametrize("values", ["tls", "sentinel", "cluster", "everything"])
def test_a_network_policy_lets_needed_traffic_through(values: str) -> None:
    manifests = render(values)
    for component in ("api", "controller"):
        policy = find(manifests, "NetworkPolicy", component)["spec"]
        (container,) = find(manifests, "Deployment", component)["spec"]["template"]["spec"]["containers"]
        target = parse(environment_of(container, manifests)["HEADGATE_REDIS_URL"])
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        names, store = policy["egress"][:2]
        assert ports([names]) == {53}
        assert {port["protocol"] for port in names["ports"]} == {"UDP", "TCP"}
        assert "to" not in names
        assert {port for _, port in target.addresses} <= ports([store])
        assert 6379 in ports([store]), "Sentinel names a primary, which has a port of its own"
        assert store.get("to", []) == values_of(values)["networkPolicy"].get("storeTo", [])
    scraped = find(manifests, "NetworkPolicy", "controller")["spec"]["ingress"]
    monitored = any(it["kind"] == "PodMonitor" for it in manifests)
    assert ports(scraped) == ({METRICS_PORT} if monitored else set())
    assert not monitored or scraped[0]["from"] == values_of(values)["networkPolicy"]["allowFrom"]
    api = find(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert ports(api) == {port["containerPort"] for port in api_container(values)["ports"]}


def test_callers_that_are_named_are_let_in_and_so_is_the_test() -> None:
    (rule,) = find(render("everything"), "NetworkPolicy")["spec"]["ingress"]
    callers, test, proxy = rule["from"]
    assert callers == values_of("everything")["networkPolicy"]["allowFrom"][0]
    labels = find(render("everything"), "Pod", "test")["metadata"]["labels"]
    assert test["podSelector"]["matchLabels"].items() <= labels.items()
    labels = find(render("everything"), "Deployment", "proxy")["spec"]["template"]["metadata"]["labels"]
    assert proxy["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_proxy_reaches_the_api_alone_and_knows_no_secret_but_its_keys() -> None:
    manifests = render("everything")
    (container,) = find(manifests, "Deployment", "proxy")["spec"]["template"]["spec"]["containers"]
    assert {it["name"] for it in container["env"]} == {"HEADGATE_PROXY_API_KEY", "HEADGATE_PROXY_CLIENT_KEY", "TZ"}
    service = find(manifests, "Service")
    upstream = f"--upstream=https://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert upstream in container["args"]
    _, to_api, _ = find(manifests, "NetworkPolicy", "proxy")["spec"]["egress"]
    labels = find(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert to_api["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert not [it for it in render("minimal") if it["metadata"]["labels"]["app.kubernetes.io/component"] == "proxy"]


def test_the_bundled_valkey_lets_in_api_and_controller_alone() -> None:
    manifests = render("trial", sets=("networkPolicy.enabled=true",))
    policy = find(manifests, "NetworkPolicy", "valkey")["spec"]
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    assert ports([rule]) == {6379}
    let_in = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    for component, wanted in zip(("api", "controller"), let_in, strict=True):
        labels = find(manifests, "Deployment", component)["spec"]["template"]["metadata"]["labels"]
        assert wanted.items() <= labels.items()
        store = find(manifests, "NetworkPolicy", component)["spec"]["egress"][1]
        pod = find(manifests, "StatefulSet", "valkey")["spec"]["template"]
        assert store["to"][0]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert ports([store]) == {6379}


METRICS_PORT = 9090


def test_prometheus_finds_the_controller_s_metrics_either_way() -> None:
    manifests = render("everything")
    template = find(manifests, "Deployment", "controller")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    annotations = template["metadata"]["annotations"]
    environment = environment_of(container, manifests)
    assert port["containerPort"] == METRICS_PORT == int(environment["HEADGATE_METRICS_PORT"])
    assert annotations["prometheus.io/port"] == str(METRICS_PORT)
    assert environment["HEADGATE_HOST"] == values_of("everything")["config"]["host"]
    (endpoint,) = find(manifests, "PodMonitor", "controller")["spec"]["podMetricsEndpoints"]
    assert (endpoint["path"], endpoint["port"]) == (annotations["prometheus.io/path"], port["name"])


def test_the_alerts_are_those_of_the_documents() -> None:
    documented = yaml.safe_load((ROOT / "docs" / "alerts.yaml").read_text())
    assert find(render("everything"), "PrometheusRule")["spec"] == documented
    assert not [it for it in render("minimal") if it["kind"] == "PrometheusRule"]


def test_prometheus_finds_the_metrics_either_way() -> None:
    manifests = render("everything")
    annotations = find(manifests, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(api_container("everything")["ports"][0]["containerPort"])
    (endpoint,) = find(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["path"], endpoint["scheme"]) == (annotations["prometheus.io/path"], "https")


def test_parts_that_are_switched_off_are_not_rendered() -> None:
    off = ("controller.enabled=false", "podDisruptionBudget.enabled=false", "serviceAccount.create=false",
           "preStopSleepSeconds=0")  # fmt: skip
    manifests = render("minimal", sets=off)
    assert sorted(it["kind"] for it in manifests) == ["Deployment", "Pod", "Secret", "Service"]
    assert {pod["spec"]["serviceAccountName"] for _, pod in pods(manifests)} == {"default"}
    assert "lifecycle" not in api_container("minimal", sets=off)


NOTES: list[tuple[str, tuple[str, ...], Any]] = [
    ("minimal", (), ["there is no policy file. Requests that no policy covers are approved"]),
    ("minimal", ("config.uncovered=refuse",), ["Requests that no policy covers are refused"]),
    ("trial", (), ["bundled Valkey, for trials only", "only one API pod"]),
    ("minimal", ("controller.enabled=false", "policies.content=x"), ["the controller is off"]),
    ("everything", (), []),
]


@pytest.mark.parametrize(("values", "sets", "expected"), NOTES)
def test_the_notes_say_how_to_begin_and_what_is_amiss(
    values: str, sets: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    """Helm shows them only where there is a cluster: here a copy of the chart renders them as one more manifest."""
    chart = tmp_path / "headgate"
    for path in CHART.rglob("*"):
        if path.is_file():
            copy = chart / path.relative_to(CHART)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (chart / "files" / "notes").write_bytes((CHART / "templates" / "NOTES.txt").read_bytes())
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\ntext: {{ tpl (.Files.Get "files/notes") . | toJson }}\n'
    )
    (text,) = [it["text"] for it in render(values, sets=sets, chart=chart) if it["kind"] == "Notes"]
    service = find(render(values, sets=sets), "Service")
    port = service["spec"]["ports"][0]["port"]
    assert f"svc/{service['metadata']['name']} 8080:{port}\n" in text
    assert f"://{service['metadata']['name']}.{NAMESPACE}.svc:{port}\n" in text
    assert text.count("NOTE: ") == len(expected)
    assert all(words in text for words in expected)

{{/*
What the schema cannot say, or not clearly: each problem on a line that says what to do. Nothing that may hold a
password is repeated.
*/}}
{{- define "headgate.problems" -}}
{{- range $place, $name := dict "redis.existingSecret" .Values.redis.existingSecret "redis.tlsSecret" .Values.redis.tlsSecret "apiKeys.existingSecret" .Values.apiKeys.existingSecret "secret.existingSecret" .Values.secret.existingSecret "tls.existingSecret" .Values.tls.existingSecret "serviceMonitor.authorization.existingSecret" .Values.serviceMonitor.authorization.existingSecret "policies.existingConfigMap" .Values.policies.existingConfigMap "proxy.existingSecret" .Values.proxy.existingSecret "serviceAccount.name" .Values.serviceAccount.name "priorityClassName" .Values.priorityClassName }}
{{- if not (regexMatch "^$|^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$" $name) }}
{{ $place }} is not a name that Kubernetes knows: lower-case letters, digits, - and . only
{{- end }}
{{- end }}
{{- if not (regexMatch "^$|^sha256:[0-9a-f]{64}$" .Values.image.digest) }}
image.digest must be sha256: and 64 hexadecimal digits
{{- end }}
{{- range $place, $time := dict "serviceMonitor.interval" .Values.serviceMonitor.interval "serviceMonitor.scrapeTimeout" .Values.serviceMonitor.scrapeTimeout }}
{{- if not (regexMatch "^[0-9]+(ms|s|m|h)$" $time) }}
{{ $place }} must be a time with its unit, as in 15s
{{- end }}
{{- end }}
{{- $stores := list }}
{{- if .Values.redis.url }}{{ $stores = append $stores "redis.url" }}{{ end }}
{{- if .Values.redis.existingSecret }}{{ $stores = append $stores "redis.existingSecret" }}{{ end }}
{{- if .Values.valkey.enabled }}{{ $stores = append $stores "valkey.enabled" }}{{ end }}
{{- if not $stores }}
no store: set redis.url or redis.existingSecret, or valkey.enabled=true for a trial
{{- else if gt (len $stores) 1 }}
more than one store: {{ join " and " $stores }} are set; set one of them
{{- end }}
{{- if and .Values.redis.url (not (regexMatch "^rediss?(\\+(sentinel|cluster))?://[^/]" .Values.redis.url)) }}
redis.url is not a store URL: the forms are redis://host:port/db, rediss://host:port/db, redis+sentinel://host,host/service and redis+cluster://host,host
{{- end }}
{{- if and (regexMatch "^rediss?\\+sentinel://" .Values.redis.url) (not (regexMatch "^[^/]+//[^/?]+/[^/?]+" .Values.redis.url)) }}
redis.url names no service: add /service after Sentinel's hosts
{{- end }}
{{- if and .Values.redis.tlsSecret .Values.redis.url (not (regexMatch "^rediss" .Values.redis.url)) }}
redis.tlsSecret is set, and redis.url does not use TLS: begin it with rediss
{{- end }}
{{- if not (regexMatch "^[A-Za-z0-9_-]*$" .Values.valkey.password) }}
valkey.password may have letters, digits, - and _ only: it becomes part of a URL
{{- end }}

{{- if and (not .Values.apiKeys.entries) (not .Values.apiKeys.existingSecret) }}
no API keys: make one with `headgate keys new` and put its entry into apiKeys.entries, or set apiKeys.existingSecret
{{- else if and .Values.apiKeys.entries .Values.apiKeys.existingSecret }}
API keys twice: set one of apiKeys.entries and apiKeys.existingSecret
{{- end }}
{{- range $index, $entry := .Values.apiKeys.entries }}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:(caller|viewer|admin):[0-9a-f]{64}(:[A-Za-z0-9][A-Za-z0-9._-]{0,63}|:([A-Za-z0-9][A-Za-z0-9._-]{0,63})?:(critical_plus|critical|sheddable_plus|sheddable))?$" $entry) }}
apiKeys.entries[{{ $index }}] does not have the form name:role:sha256[:namespace[:max_criticality]], as `headgate keys new` prints it
{{- end }}
{{- end }}
{{- if and .Values.secret.value .Values.secret.existingSecret }}
the secret twice: set one of secret.value and secret.existingSecret
{{- end }}
{{- if and .Values.secret.value (lt (len .Values.secret.value) 16) }}
secret.value must have at least 16 characters
{{- end }}
{{- if and .Values.policies.content .Values.policies.existingConfigMap }}
policies twice: set one of policies.content and policies.existingConfigMap
{{- end }}

{{- $pods := .Values.autoscaling.enabled | ternary .Values.autoscaling.minReplicas .Values.replicaCount | int }}
{{- if .Values.autoscaling.enabled }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
autoscaling.minReplicas ({{ .Values.autoscaling.minReplicas }}) is more than autoscaling.maxReplicas ({{ .Values.autoscaling.maxReplicas }})
{{- end }}
{{- if and .Values.autoscaling.targetCPUUtilizationPercentage (not (dig "requests" "cpu" "" .Values.resources)) }}
autoscaling by CPU needs resources.requests.cpu: the target is a percentage of it
{{- end }}
{{- if not (or .Values.autoscaling.targetCPUUtilizationPercentage .Values.autoscaling.metrics) }}
autoscaling has nothing to go by: set autoscaling.targetCPUUtilizationPercentage or autoscaling.metrics
{{- end }}
{{- end }}
{{- if .Values.podDisruptionBudget.enabled }}
{{- $away := include "headgate.amount" .Values.podDisruptionBudget.maxUnavailable }}
{{- $stay := include "headgate.amount" .Values.podDisruptionBudget.minAvailable }}
{{- if eq (empty $away) (empty $stay) }}
podDisruptionBudget needs one of maxUnavailable and minAvailable, and the other one empty
{{- else if or (has $away (list "0" "0%")) (eq $stay "100%") (and (regexMatch "^[0-9]+$" $stay) (ge (int $stay) $pods)) }}
podDisruptionBudget would let no pod go, so that no node could ever be drained: {{ empty $away | ternary (printf "minAvailable is %s of %d" $stay $pods) (printf "maxUnavailable is %s" $away) }}
{{- end }}
{{- end }}
{{- if lt (int .Values.terminationGracePeriodSeconds) (add 35 .Values.preStopSleepSeconds) }}
terminationGracePeriodSeconds must be at least {{ add 35 .Values.preStopSleepSeconds }}: preStopSleepSeconds, and 35 for what is in flight
{{- end }}
{{- if gt (int .Values.probes.timeoutSeconds) (int .Values.probes.periodSeconds) }}
probes.timeoutSeconds ({{ .Values.probes.timeoutSeconds }}) is more than probes.periodSeconds ({{ .Values.probes.periodSeconds }})
{{- end }}

{{- if and .Values.proxy.enabled (not .Values.proxy.existingSecret) }}
proxy.enabled needs proxy.existingSecret: your own Secret with an API key of role caller, and the key that clients of the proxy send
{{- end }}

{{- $extra := dict "extraEnv" .Values.extraEnv "controller.extraEnv" .Values.controller.extraEnv "proxy.extraEnv" .Values.proxy.extraEnv }}
{{- range $place, $own := dict "extraEnv" "headgate.apiEnv" "controller.extraEnv" "headgate.controllerEnv" "proxy.extraEnv" "headgate.proxyEnv" }}
{{- $names := list }}
{{- range include $own $ | fromYamlArray }}{{ $names = append $names .name }}{{ end }}
{{- range get $extra $place }}
{{- if has .name $names }}
{{ $place }}: {{ .name }} is set by the chart; use its own value for it
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $_ := .Values.podLabels }}
{{- if has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") }}
podLabels: {{ $name }} tells pods apart and cannot be changed
{{- end }}
{{- end }}
{{- end }}

{{- define "headgate.validate" -}}
{{- with include "headgate.problems" . | trim }}
{{- fail (printf "\n%s\n" .) }}
{{- end }}
{{- end }}

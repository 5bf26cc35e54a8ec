{{/* The chart's name. */}}
{{- define "headgate.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* Release and chart in one name, with room left for what is appended to it. */}}
{{- define "headgate.fullname" -}}
{{- $name := include "headgate.name" . }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* What tells the pods of one component from all others; never changes. Takes root and component. */}}
{{- define "headgate.selectorLabels" -}}
app.kubernetes.io/name: {{ include "headgate.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of everything that the chart makes. Takes root and component. */}}
{{- define "headgate.labels" -}}
{{ include "headgate.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: headgate
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Name, namespace and labels. Takes root, component and, unless it is the API's, a suffix for the name. */}}
{{- define "headgate.metadata" -}}
name: {{ include "headgate.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headgate.labels" . | nindent 2 }}
{{- end }}

{{- define "headgate.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "headgate.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "headgate.fullname" .) "default") }}
{{- end }}

{{/* Pod security "restricted", the pod's part. The image says which user. */}}
{{- define "headgate.podSecurityContext" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Pod security "restricted", each container's part, and nothing to write on but volumes. */}}
{{- define "headgate.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Labels and annotations of a pod. Takes root, component and the annotations that come with it. */}}
{{- define "headgate.podMetadata" -}}
labels:
  {{- merge (include "headgate.labels" . | fromYaml) .root.Values.podLabels | toYaml | nindent 2 }}
{{- with merge (deepCopy .annotations) .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What every pod of the image has. A Service called headgate would otherwise set HEADGATE_PORT, which is a setting. */}}
{{- define "headgate.podIdentity" -}}
serviceAccountName: {{ include "headgate.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "headgate.podSecurityContext" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Where pods go. Takes root and component. */}}
{{- define "headgate.scheduling" -}}
{{- $selector := include "headgate.selectorLabels" . | fromYaml }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $constraints := list }}
{{- range .root.Values.topologySpreadConstraints }}
{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $selector) "matchLabelKeys" (list "pod-template-hash"))) }}
{{- end }}
{{- with $constraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the chart's own Secret holds, as a mapping; empty if all of it is in Secrets of the user's. */}}
{{- define "headgate.secretData" -}}
{{- if .Values.valkey.enabled }}
redis-url: {{ printf "redis://%s%s-valkey:6379/0" (empty .Values.valkey.password | ternary "" (printf ":%s@" .Values.valkey.password)) (include "headgate.fullname" .) | quote }}
{{- else if .Values.redis.url }}
redis-url: {{ .Values.redis.url | quote }}
{{- end }}
{{- with .Values.apiKeys.entries }}
api-keys: {{ join "," . | quote }}
{{- end }}
{{- with .Values.secret.value }}
secret: {{ . | quote }}
{{- end }}
{{- end }}

{{/* A reference to a Secret of the user's, or to the chart's. Takes root, existingSecret, existingSecretKey and key. */}}
{{- define "headgate.secretRef" -}}
valueFrom:
  secretKeyRef:
    name: {{ .existingSecret | default (include "headgate.fullname" .root) }}
    key: {{ .existingSecret | empty | ternary .key .existingSecretKey }}
{{- end }}

{{/* The variables of every process that talks to the store. */}}
{{- define "headgate.commonEnv" -}}
- name: HEADGATE_REDIS_URL
  {{- include "headgate.secretRef" (dict "root" . "key" "redis-url" "existingSecret" .Values.redis.existingSecret "existingSecretKey" .Values.redis.existingSecretKey) | nindent 2 }}
- name: HEADGATE_LOG_FORMAT
  value: {{ .Values.config.logFormat }}
- name: HEADGATE_LOG_LEVEL
  value: {{ .Values.config.logLevel }}
{{- end }}

{{/* The variables of the API. Numbers as JSON writes them: a template would print 1048576 as 1.048576e+06. */}}
{{- define "headgate.apiEnv" -}}
{{ include "headgate.commonEnv" . }}
- name: HEADGATE_API_KEYS
  {{- include "headgate.secretRef" (dict "root" . "key" "api-keys" "existingSecret" .Values.apiKeys.existingSecret "existingSecretKey" .Values.apiKeys.existingSecretKey) | nindent 2 }}
{{- if or .Values.secret.value .Values.secret.existingSecret }}
- name: HEADGATE_SECRET
  {{- include "headgate.secretRef" (dict "root" . "key" "secret" "existingSecret" .Values.secret.existingSecret "existingSecretKey" .Values.secret.existingSecretKey) | nindent 2 }}
{{- end }}
- name: HEADGATE_PORT
  value: "8080"
{{- range $name, $value := omit .Values.config "logFormat" "logLevel" }}
- name: HEADGATE_{{ snakecase $name | upper }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- if include "headgate.policiesConfigMap" . }}
- name: HEADGATE_POLICIES
  value: /etc/headgate/policies/policies.yaml
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: HEADGATE_TLS_CERTIFICATE
  value: /etc/headgate/tls/tls.crt
- name: HEADGATE_TLS_KEY
  value: /etc/headgate/tls/tls.key
{{- end }}
{{- end }}

{{/* The variables of the controller: what it needs, and no key that it does not. */}}
{{- define "headgate.controllerEnv" -}}
{{ include "headgate.commonEnv" . }}
- name: HEADGATE_HOST
  value: {{ .Values.config.host | quote }}
- name: HEADGATE_METRICS_PORT
  value: "9090"
- name: HEADGATE_CYCLE_MS
  value: {{ .Values.controller.cycleMs | toJson | quote }}
{{- end }}

{{/* The variables of the proxy: its key for the API, and the one that its clients send. */}}
{{- define "headgate.proxyEnv" -}}
- name: HEADGATE_PROXY_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.proxy.existingSecret }}
      key: {{ .Values.proxy.existingSecretApiKey }}
- name: HEADGATE_PROXY_CLIENT_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.proxy.existingSecret }}
      key: {{ .Values.proxy.existingSecretClientKey }}
{{- end }}

{{/* The ConfigMap with the policy file; empty if there is none. */}}
{{- define "headgate.policiesConfigMap" -}}
{{- if .Values.policies.existingConfigMap -}}
{{ .Values.policies.existingConfigMap }}
{{- else if .Values.policies.content -}}
{{ include "headgate.fullname" . }}-policies
{{- end }}
{{- end }}

{{/* Mounts and volumes of every process that talks to the store. */}}
{{- define "headgate.commonMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .Values.redis.tlsSecret }}
- name: redis-tls
  mountPath: /etc/headgate/redis-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "headgate.commonVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with .Values.redis.tlsSecret }}
- name: redis-tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}

{{/* A number or percentage as text; empty if it is not given, which 0 is. */}}
{{- define "headgate.amount" -}}
{{- kindIs "invalid" . | ternary "" (toString .) }}
{{- end }}

{{- define "headgate.scheme" -}}
{{- empty .Values.tls.existingSecret | ternary "HTTP" "HTTPS" }}
{{- end }}

{{/* Where the API is inside the cluster. */}}
{{- define "headgate.url" -}}
{{- printf "%s://%s.%s.svc:%v" (include "headgate.scheme" . | lower) (include "headgate.fullname" .) .Release.Namespace .Values.service.port }}
{{- end }}

{{/* The store's ports: those listed and those that redis.url names, as a JSON list. */}}
{{- define "headgate.storePorts" -}}
{{- $ports := list }}
{{- range .Values.networkPolicy.storePorts }}
{{- $ports = append $ports (int .) }}
{{- end }}
{{- range regexFindAll ":[0-9]+(,|/|\\?|$)" .Values.redis.url -1 }}
{{- $ports = append $ports (regexFind "[0-9]+" . | int) }}
{{- end }}
{{- $ports | uniq | toJson }}
{{- end }}

{{/* What API and controller may reach: resolvers, the store, and what was asked for. */}}
{{- define "headgate.egress" -}}
# Names: any resolver, since some run on the node itself.
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- if .Values.valkey.enabled }}
- to:
    - podSelector:
        matchLabels:
          {{- include "headgate.selectorLabels" (dict "root" . "component" "valkey") | nindent 10 }}
  ports:
    - {port: 6379, protocol: TCP}
{{- else }}
- ports:
    {{- range include "headgate.storePorts" . | fromJsonArray }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicy.storeTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The bundled Valkey's settings. */}}
{{- define "headgate.valkeyConf" -}}
bind * -::*
protected-mode no
port 6379
dir /data
appendonly yes
appendfsync everysec
save ""
maxmemory {{ int64 .Values.valkey.maxmemoryMib }}mb
maxmemory-policy noeviction
{{- with .Values.valkey.password }}
requirepass {{ . }}
{{- end }}
{{- end }}

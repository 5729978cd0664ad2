{{- define "twostroke.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: KubeRay appends group names and hashes. */}}
{{- define "twostroke.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "twostroke.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "twostroke.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/*
Selector labels of one component. Call with (dict "root" $ "component" "router"). Without app.kubernetes.io/name:
KubeRay puts its own there, and its head service selects by it.
*/}}
{{- define "twostroke.selector" -}}
app.kubernetes.io/part-of: twostroke
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "twostroke.labels" -}}
{{ include "twostroke.selector" . }}
app.kubernetes.io/name: {{ include "twostroke.name" .root }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "twostroke.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "twostroke.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Call with (dict "root" $ "role" "worker"). */}}
{{- define "twostroke.image" -}}
{{- $image := index .root.Values.images .role -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{- define "twostroke.graceSeconds" -}}
{{- add .Values.shutdown.pauseSeconds .Values.shutdown.drainSeconds .Values.shutdown.marginSeconds -}}
{{- end -}}

{{/* The configuration file without the Redis address, which may be a secret: see twostroke.resolveConfig. */}}
{{- define "twostroke.config" -}}
{{- $pools := dict -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $values := index $.Values $pool -}}
{{- $_ := set $pools $pool (dict "replicas" $values.replicas "threads" $values.threads "chunk_tokens" $values.chunkTokens) -}}
{{- end -}}
{{- $model := dict "source" .Values.model.source "name" .Values.model.name -}}
{{- $router := dict "replicas" 0 "host" "0.0.0.0" "http_port" .Values.router.httpPort "grpc_port" .Values.router.grpcPort -}}
{{- $ray := dict "address" "127.0.0.1:6379" "drain_s" .Values.shutdown.drainSeconds "pool_resources" true
    "prefill_gpus" .Values.prefill.gpus "decode_gpus" .Values.decode.gpus -}}
{{- $config := dict
    "cluster" (include "twostroke.fullname" .)
    "model" $model
    "pages" (dict "page_size" .Values.pages.pageSize "num_pages" .Values.pages.numPages)
    "worker" (dict "host" "0.0.0.0")
    "prefill" $pools.prefill
    "decode" $pools.decode
    "router" $router
    "ray" $ray
    "telemetry" (dict "log_level" .Values.telemetry.logLevel "log_format" "json") -}}
{{- if .Values.monitoring.enabled -}}
{{- $_ := set $config.telemetry "metrics_port" (.Values.monitoring.metricsPort | int) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) -}}
{{- end -}}

{{/* Shell: the configuration with the Redis address, in memory only. */}}
{{- define "twostroke.resolveConfig" -}}
python -c 'import os, yaml; data = yaml.safe_load(open("/etc/twostroke/config.yaml")); data.setdefault("redis", {})["url"] = os.environ["TWOSTROKE_REDIS_URL"]; yaml.safe_dump(data, open("/run/twostroke/config.yaml", "w"))'
{{- end -}}

{{- define "twostroke.redisUrlEnv" -}}
- name: TWOSTROKE_REDIS_URL
{{- if .Values.redis.bundled }}
  value: redis://{{ include "twostroke.fullname" . }}-redis:6379/0
{{- else if .Values.redis.externalSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.externalSecret.name }}
      key: {{ .Values.redis.externalSecret.key }}
{{- else }}
  value: {{ required "redis.externalUrl or redis.externalSecret.name is needed when redis.bundled is false" .Values.redis.externalUrl }}
{{- end }}
{{- end -}}

{{- define "twostroke.hubEnv" -}}
- name: HF_HOME
  value: /var/lib/twostroke/hub
{{- with .Values.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "twostroke.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "twostroke.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Of the pods that read the configuration; workers get theirs from the supervisor. */}}
{{- define "twostroke.configMounts" -}}
- name: config
  mountPath: /etc/twostroke
  readOnly: true
- name: resolved
  mountPath: /run/twostroke
{{- end -}}

{{- define "twostroke.configVolumes" -}}
- name: config
  configMap:
    name: {{ include "twostroke.fullname" . }}
- name: resolved
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end -}}

{{/* Of every pod that runs twostroke. */}}
{{- define "twostroke.mounts" -}}
- name: home
  mountPath: /var/lib/twostroke
{{- if .Values.model.existingClaim }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "twostroke.volumes" -}}
- name: home
  emptyDir: {}
{{- if .Values.model.existingClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.existingClaim }}
    readOnly: true
{{- end }}
{{- end -}}

{{/* Call with the placement values of a component. */}}
{{- define "twostroke.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "twostroke.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
The first process of a Ray pod. On SIGTERM Ray ends first; its role process loses its keeper, drains by itself
(60 s at most), and only when it is gone does the container end. The same when Ray ends first. The pattern's brackets keep pgrep from finding this shell.
*/}}
{{- define "twostroke.rayScript" -}}
ulimit -n 65536 || true
set -m  # Ray gets a process group of its own, so that the signal reaches more than a shell in between
eval "$KUBERAY_GEN_RAY_START_CMD" &
ray=$!
drain() {
  kill -TERM -- "-$ray" 2>/dev/null
  while pgrep -f "[t]wostroke.cluster.main run" >/dev/null; do sleep 1; done
}
trap drain TERM
wait "$ray"
drain
{{- end -}}

{{/* The head's: besides, bring the cluster up, and again whenever the configuration changes (helm upgrade). */}}
{{- define "twostroke.headScript" -}}
bring_up() {
  applied=""
  while true; do
    wanted=$(md5sum /etc/twostroke/config.yaml)
    if [ "$wanted" != "$applied" ]; then
      {{ include "twostroke.resolveConfig" . }}
      if python -m twostroke.cluster.main up --config /run/twostroke/config.yaml; then applied="$wanted"; fi
    fi
    sleep 5
  done
}
bring_up &
{{ include "twostroke.rayScript" . }}
{{- end -}}

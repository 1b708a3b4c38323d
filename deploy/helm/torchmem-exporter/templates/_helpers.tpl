{{- define "torchmem.name" -}}
{{- printf "%s-torchmem" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "torchmem.labels" -}}
app.kubernetes.io/name: torchmem-exporter
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "torchmem.selector" -}}
app.kubernetes.io/name: torchmem-exporter
app.kubernetes.io/instance: {{ .Release.Name }}
torchmem/exporter: node
{{- end }}

{{- define "torchmem.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "torchmem.web" -}}
{{ include "torchmem.name" . }}-web
{{- end }}

{{- /* Takes the chart's context and the directory of the records: (list . directory). */}}
{{- define "torchmem.args" -}}
{{- $directory := index . 1 }}
{{- with index . 0 -}}
- --dir={{ $directory }}
- --listen=0.0.0.0:{{ .Values.port }}
{{- if .Values.web.secretName }}
- --web-config=/etc/torchmem/web-config.yml
- --bearer-token-file=/etc/torchmem/token
{{- else }}
- --allow-open-bind
{{- end }}
- --level={{ .Values.level }}
- --log-format=json
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Takes the same; the directory is for `kubectl exec POD -c torchmem -- torchmem show`. */}}
{{- define "torchmem.env" -}}
{{- $directory := index . 1 }}
{{- with index . 0 -}}
- name: TORCHMEM_DIR
  value: {{ $directory }}
- name: K8S_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: K8S_POD_UID
  valueFrom:
    fieldRef:
      fieldPath: metadata.uid
- name: K8S_NAMESPACE_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: K8S_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: K8S_CONTAINER_NAME
  value: torchmem
{{- with .Values.clusterName }}
- name: K8S_CLUSTER_NAME
  value: {{ . | quote }}
{{- end }}
{{- if .Values.otlp.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .Values.otlp.endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ .Values.otlp.protocol | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "torchmem.ports" -}}
- name: torchmem
  containerPort: {{ .Values.port }}
  protocol: TCP
{{- end }}

{{- define "torchmem.probes" -}}
livenessProbe:
  httpGet:
    path: /healthz
    port: torchmem
    scheme: {{ ternary "HTTPS" "HTTP" (ne .Values.web.secretName "") }}
  periodSeconds: 30
  timeoutSeconds: 5
  failureThreshold: 4
readinessProbe:
  httpGet:
    {{- /* /readyz wants the token where there is one, which a kubelet has not */}}
    path: {{ ternary "/healthz" "/readyz" (ne .Values.web.secretName "") }}
    port: torchmem
    scheme: {{ ternary "HTTPS" "HTTP" (ne .Values.web.secretName "") }}
  periodSeconds: 15
  timeoutSeconds: 5
{{- end }}

{{- define "torchmem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: {{ .Values.runAsNonRoot }}
capabilities:
  drop:
    - ALL
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "torchmem.webVolume" -}}
- name: torchmem-web
  projected:
    defaultMode: 288 # 0440: readable by the pod's fsGroup
    sources:
      - configMap:
          name: {{ include "torchmem.web" . }}
      - secret:
          name: {{ .Values.web.secretName }}
{{- end }}

{{- define "torchmem.webMount" -}}
- name: torchmem-web
  mountPath: /etc/torchmem
  readOnly: true
{{- end }}

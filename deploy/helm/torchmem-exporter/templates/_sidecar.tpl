{{- /*
For a chart of your own that trains: name this one as a dependency (daemonset.enabled: false) and, in its pod,

  {{- $torchmem := index .Subcharts "torchmem-exporter" }}
  metadata:
    labels: {{- include "torchmem.sidecar.labels" $torchmem | nindent 6 }}
  spec:
    initContainers: {{- include "torchmem.sidecar.container" $torchmem | nindent 6 }}
    containers:
      - name: training
        env: {{- include "torchmem.sidecar.env" $torchmem | nindent 10 }}
        volumeMounts: {{- include "torchmem.sidecar.mounts" $torchmem | nindent 10 }}
    volumes: {{- include "torchmem.sidecar.volumes" $torchmem | nindent 6 }}

Each is a list (labels: a map), to be put beside what is there. The pod's runAsUser and fsGroup hold for both containers:
records can be read by the user who left them. Name the job beside torchmem.sidecar.env, with TORCHMEM_TRAIN_JOB: jobs
without a name become one, or a new one at each start.
*/}}
{{- define "torchmem.sidecar.labels" -}}
torchmem/exporter: sidecar
{{- end }}

{{- define "torchmem.sidecar.env" -}}
- name: TORCHMEM_DIR
  value: {{ .Values.sidecar.directory }}
{{- end }}

{{- define "torchmem.sidecar.mounts" -}}
- name: torchmem
  mountPath: {{ .Values.sidecar.directory }}
{{- end }}

{{- define "torchmem.sidecar.volumes" -}}
- name: torchmem
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sidecar.sizeLimit }}
{{- if .Values.web.secretName }}
{{ include "torchmem.webVolume" . }}
{{- end }}
{{- end }}

{{- define "torchmem.sidecar.container" -}}
- name: torchmem
  image: {{ include "torchmem.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args: {{- include "torchmem.args" (list . .Values.sidecar.directory) | nindent 4 }}
  ports: {{- include "torchmem.ports" . | nindent 4 }}
  env: {{- include "torchmem.env" (list . .Values.sidecar.directory) | nindent 4 }}
  volumeMounts:
    {{- include "torchmem.sidecar.mounts" . | nindent 4 }}
    {{- if .Values.web.secretName }}
    {{- include "torchmem.webMount" . | nindent 4 }}
    {{- end }}
  {{- include "torchmem.probes" . | nindent 2 }}
  lifecycle:
    preStop:
      sleep:
        seconds: {{ .Values.sidecar.lastScrapeSeconds }}
  resources: {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    {{- if not (kindIs "invalid" .Values.sidecar.runAsUser) }}
    runAsUser: {{ .Values.sidecar.runAsUser }}
    {{- end }}
    {{- include "torchmem.containerSecurity" . | nindent 4 }}
{{- end }}

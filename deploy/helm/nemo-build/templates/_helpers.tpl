{{- define "nemo-build.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of an engine's objects. Argument: dict "root" $ "engine" one of .Values.engines. */}}
{{- define "nemo-build.fullname" -}}
{{- printf "%s-%s" (include "nemo-build.name" .root) .engine.name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "nemo-build.selector" -}}
app.kubernetes.io/name: nemo-build
app.kubernetes.io/instance: {{ .root.Release.Name }}
nemo-build/engine: {{ .engine.name }}
{{- end -}}

{{- define "nemo-build.labels" -}}
{{ include "nemo-build.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "nemo-build.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The command: of the image, or of what an init container has installed. */}}
{{- define "nemo-build.command" -}}
{{- if .Values.nemoBuild.wheel }}/packages/bin/nemo-build{{ else }}nemo-build{{ end -}}
{{- end -}}

{{- define "nemo-build.autoscales" -}}
{{- if and (ne .root.Values.autoscaling.kind "none") (gt (int (default 1 .engine.maxReplicas)) (int .engine.replicas)) -}}
true
{{- end -}}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "nemo-build.check" -}}
{{- if not .Values.engines -}}
{{- fail "engines is empty: name at least one engine and where it is; values.yaml has an example" -}}
{{- end -}}
{{- $ours := ne .Values.image.repository "nvcr.io/nvidia/tritonserver" -}}
{{- if not (or $ours .Values.nemoBuild.wheel) -}}
{{- fail "NVIDIA's container does not have nemo-build: set nemoBuild.wheel, or image.repository to an image built from deploy/Dockerfile" -}}
{{- end -}}
{{- $version := regexFind "^[0-9]+\\.[0-9]+" .Values.image.tag -}}
{{- if and (not $ours) (not .Values.image.digest) (semverCompare "<25.12" (default "0.0" $version)) -}}
{{- fail (printf "image.tag is %s: servers before 25.12 can be ended by malformed requests" .Values.image.tag) -}}
{{- end -}}
{{- $names := dict -}}
{{- range .Values.engines -}}
{{- if hasKey $names .name -}}
{{- fail (printf "engines has two of the name %s" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- end -}}

{{/* Environment of containers that run nemo-build. */}}
{{- define "nemo-build.environment" -}}
- {name: HOME, value: /tmp}
{{- if .Values.nemoBuild.wheel }}
- {name: PYTHONPATH, value: /packages}
{{- end }}
{{- end -}}

{{- define "nemo-build.mounts" -}}
- {name: scripts, mountPath: /scripts, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.nemoBuild.wheel }}
- {name: packages, mountPath: /packages}
{{- end }}
{{- end -}}

{{- define "rljob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* 46 characters leave room for the suffixes of object names. */ -}}
{{- define "rljob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 46 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "rljob.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 46 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 46 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rljob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rljob.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name must name an existing ServiceAccount when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* Immutable in a Deployment: nothing that a user or an upgrade can change belongs here. */ -}}
{{- define "rljob.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rljob.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* {a: b, c: d} as a=b,c=d */ -}}
{{- define "rljob.flagLabels" -}}
{{- $parts := list -}}
{{- range $key, $value := . -}}{{- $parts = append $parts (printf "%s=%s" $key $value) -}}{{- end -}}
{{- join "," $parts -}}
{{- end -}}

{{- define "rljob.commonLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: rljob
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rljob.labels" -}}
{{ include "rljob.selectorLabels" . }}
{{ include "rljob.commonLabels" . }}
{{- end -}}

{{- define "rljob.image" -}}
{{- $image := .Values.image -}}
{{- $name := printf "%s/%s" $image.registry $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Pod security level restricted, for the operator and the test pod alike. */ -}}
{{- define "rljob.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "rljob.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* What the operator does in every namespace it watches. It cannot write a job's spec: it has no permission to. */ -}}
{{- define "rljob.managerRules" -}}
- apiGroups: [rljob.io]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [rljob.io]
  resources: [rljobs/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need it where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [rljob.io]
  resources: [rljobs/finalizers]
  verbs: [update]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- if eq .Values.clusterAccess "Proxy" }}
- apiGroups: [""]
  resources: [pods/proxy]
  verbs: [get, create]
{{- end }}
- apiGroups: [""]
  resources: [secrets, configmaps]
  verbs: [get, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- end -}}

//go:build tools

// Package tools pins the KubeRay operator that the test cluster runs.
package tools

import _ "github.com/ray-project/kuberay/ray-operator"

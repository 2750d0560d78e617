//go:build tools

// Package tools pins the DNS server that the test cluster runs.
package tools

import _ "github.com/coredns/coredns"

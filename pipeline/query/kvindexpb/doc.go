// Package kvindexpb is the query protocol, generated from kvindex.proto by
// gen.sh (make proto).
package kvindexpb

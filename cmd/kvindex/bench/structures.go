// This file is the structures by name.

package bench

import (
	"fmt"
	"slices"
	"strings"

	"kvindex/index"
)

// structure is a structure that can be measured.
type structure struct {
	name  string
	alone bool // it is for one goroutine: no readers beside the writer
	empty func() index.Structure
}

// structures are all of them, the default first.
var structures = []structure{
	{"runs", false, func() index.Structure { return index.NewRunIndex() }},
	{"positional", false, func() index.Structure { return index.NewPositionalIndex(0) }},
	{"concurrent-radix", false, func() index.Structure { return index.NewConcurrentRadixTree() }},
	{"radix", true, func() index.Structure { return index.NewRadixTree(0) }},
}

// Structures returns the names of the structures, the default first.
func Structures() []string {
	var names []string
	for _, s := range structures {
		names = append(names, s.name)
	}
	return names
}

func structureOf(name string) (structure, error) {
	i := slices.IndexFunc(structures, func(s structure) bool { return s.name == name })
	if i < 0 {
		return structure{}, fmt.Errorf("no structure %q: want one of %s", name, strings.Join(Structures(), ", "))
	}
	return structures[i], nil
}
